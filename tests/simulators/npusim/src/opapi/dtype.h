// The numbers by which CANN names element types.
#pragma once

#include "aten.h"

namespace npusim {

// Throws Failure(kInvalidParam) for a type that torch on the CPU does not have.
at::ScalarType scalar_type(int acl_type);

}  // namespace npusim
