// An operator between its two phases.
#pragma once

#include <functional>
#include <string>

#include "output.h"

namespace npusim {

// Reads the arguments, computes, and says what is to be written.
using Compute = std::function<void(Writing&)>;

}  // namespace npusim

// Made by the first phase, used up by the second.
struct aclOpExecutor {
  std::string operation;
  npusim::Compute compute;
};

namespace npusim {

// The end of a first phase.
int prepared(const char* operation, Compute compute, uint64_t* workspace,
             aclOpExecutor** executor);

// The second phase: puts the computation on the stream. Returns an error code.
int launch(const char* operation, aclOpExecutor* executor, void* stream);

// Says at load time that there is such an operator.
bool known(const char* operation);

// As `launch`, and waits for its end: the host learns the shape of the result from it. So it fails
// while the stream is captured.
int launch_and_wait(const char* operation, aclOpExecutor* executor, void* stream);

}  // namespace npusim
