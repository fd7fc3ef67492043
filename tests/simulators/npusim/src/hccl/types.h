// The words of HCCL's C interface that the library needs, and what an operation is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace npusim::hccl {

// Return codes of the C functions (interface facts).
enum Result : int {
  kSuccess = 0,
  kParameter = 1,
  kPointer = 2,
  kMemory = 3,
  kNotSupported = 5,
  kUnavailable = 7,
  kTimeout = 9,
  kRuntime = 15,
};

// Data types and reductions by their numbers in the C interface.
enum Type : int32_t {
  kInt8 = 0,
  kInt16 = 1,
  kInt32 = 2,
  kFp16 = 3,
  kFp32 = 4,
  kInt64 = 5,
  kBf16 = 11,
};
enum Reduction : int32_t { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kNone = 255 };

enum class Kind : uint32_t {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kReduceScatterV,
  kAllGather,
  kAllGatherV,
  kBroadcast,
  kScatter,
  kAllToAll,
  kAllToAllV,
  kAllToAllVC,
  kBarrier,
  kSend,
  kReceive,
  kBatchSend,
  kBatchReceive,
};
constexpr size_t kKinds = 16;

// What all ranks of a collective, or both ends of a message, must say alike. It lies in memory that
// processes share.
struct Descriptor {
  Kind kind;
  int32_t type;
  uint64_t count;     // elements; 0 where the ranks' counts may differ
  int32_t reduction;  // kNone where nothing is reduced
  int32_t root;       // of a message: the other end; -1 where there is none
};

bool operator==(const Descriptor& left, const Descriptor& right);

// Bytes of one element; 0 for a type that does not exist.
size_t size_of(int32_t type);
// Whether this device can reduce so.
bool reducible(int32_t type, int32_t reduction);
const char* name_of(Kind kind);
// For instance "HcclAllReduce of 4 fp32, sum".
std::string describe(const Descriptor& what);
// The text behind a return code.
const char* error_text(int code);

}  // namespace npusim::hccl
