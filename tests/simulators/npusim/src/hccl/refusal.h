// What a C function throws to return an error code.
#pragma once

#include <stdexcept>
#include <string>

#include "types.h"

namespace npusim::hccl {

struct Refusal : std::runtime_error {
  Refusal(Result code, const std::string& what) : std::runtime_error(what), code(code) {}
  Result code;
};

}  // namespace npusim::hccl
