// Element-wise reduction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace npusim::hccl {

// Combines `bytes` bytes of elements: into = into (reduction) from. Integers wrap; 16-bit floating
// types round after each step. The type and the reduction must be `reducible`.
void combine(int32_t type, int32_t reduction, uint8_t* into, const uint8_t* from, size_t bytes);

}  // namespace npusim::hccl
