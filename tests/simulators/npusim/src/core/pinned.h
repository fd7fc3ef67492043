// Page-locked host memory: which blocks there are, and which were given back lately.
#pragma once

#include <cstddef>

namespace npusim {

// Whether the address lies in a live block.
bool is_pinned(const void* pointer);

// A fault and Failure(kDeviceException) when the range leaves a block, or lies in one that has been
// freed. `what` says for whom.
void check_host(const void* pointer, size_t bytes, const char* what);

}  // namespace npusim
