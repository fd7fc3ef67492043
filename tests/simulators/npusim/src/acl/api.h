// The boundary between C functions and the simulator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/errors.h"
#include "../core/fault.h"

#define NPUSIM_API extern "C" __attribute__((visibility("default")))

namespace npusim {

// Runs `function`; what it throws becomes the code that the C function returns.
template <typename Function>
int guarded(const char* name, Function function) {
  if (tracing()) trace(name);
  try {
    function();
    return kOk;
  } catch (const Failure& failure) {
    remember_error(failure.what());
    if (tracing()) trace(text("%s failed: %d %s", name, failure.code, failure.what()));
    return failure.code;
  }
}

// Throws Failure(kCaptureMode) where a capture forbids the function `name`.
void forbid_unsafe(const char* name);

// Throws Failure(kInvalidDevice).
void check_device(int device);

}  // namespace npusim
