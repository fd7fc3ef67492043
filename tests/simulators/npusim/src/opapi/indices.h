// Places of elements, as they come from the program.
#pragma once

#include "aten.h"

namespace npusim {

// Places in the type that all of torch's functions on the CPU take.
at::Tensor wide(const at::Tensor& index);

// One entry per dimension that is indexed. torch_npu says "all of this dimension" by an empty
// one-dimensional tensor (op_plugin/ops/opapi/IndexKernelNpuOpApi.cpp).
c10::List<std::optional<at::Tensor>> places(const std::vector<at::Tensor>& indices);

}  // namespace npusim
