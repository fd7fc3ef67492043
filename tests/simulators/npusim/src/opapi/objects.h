// What a program hands to operators: CANN's descriptions of tensors, scalars and lists.
#pragma once

#include <memory>
#include <vector>

#include "aten.h"

// A view of device memory. Copies share `reported`, so that what an operator says about its result
// reaches the program's own object.
struct aclTensor {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;  // in elements, from `data`
  at::ScalarType dtype = at::kFloat;
  int format = 2;
  void* data = nullptr;
  std::shared_ptr<std::vector<int64_t>> reported;  // the shape that a result turned out to have
};

struct aclScalar {
  at::Scalar value;
};

struct aclIntArray {
  std::vector<int64_t> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclBoolArray {
  std::vector<bool> values;
};

// Owns the tensors that it was made from.
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};

// Owns the scalars that it was made from.
struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};

namespace npusim {

// The tensor as ATen sees it on the readable side of device memory, checked against the live
// allocations; so it is asked for inside a task. Throws Failure.
at::Tensor view(const aclTensor& tensor, const char* what);

}  // namespace npusim
