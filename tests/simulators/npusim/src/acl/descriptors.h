// What the older operator interface hands over: descriptors, buffers, attributes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace npusim {

using Dims = std::vector<int64_t>;

// A tensor: what it is to the program, and how its bytes are stored.
struct Descriptor {
  int type = 0;        // number of aclDataType
  Dims shape;
  int format = 0;      // number of aclFormat
  Dims storage_shape;
  int storage_format = 0;
};

struct Buffer {
  void* data;
  size_t bytes;
};

struct Attributes {};

constexpr int kNd = 2;
constexpr int kFractalNz = 29;

// Bytes of one element; throws Failure for a type that is not known.
size_t element_bytes(int type);
// Elements in all.
int64_t elements(const Dims& dims);

}  // namespace npusim
