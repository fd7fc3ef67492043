// What the C functions share: checks, error codes, and the way onto a stream.
#pragma once

#include <functional>
#include <string>

#include "collective.h"
#include "communicator.h"
#include "exchange.h"

#define HCCL_API extern "C" __attribute__((visibility("default")))

namespace npusim::hccl {

// Runs a C function's body. What it throws becomes the return code and the text behind
// aclGetRecentErrMsg.
int guarded(const char* name, const std::function<void()>& body);

// A call that puts one operation on a stream.
class Call {
 public:
  // Throws Refusal when the handle is no communicator or there is no stream.
  Call(void* communicator, void* stream);

  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->size(); }
  Communicator& communicator() const { return *communicator_; }

  // A plan in which nobody gives anything yet.
  CollectivePlan plan(const Descriptor& what) const;
  // Builds the links that are missing, then puts the operation on the stream. Throws Refusal.
  void launch(CollectivePlan plan) const;
  void launch(ExchangePlan plan) const;

 private:
  void put(const std::string& what, Body body) const;

  Shared communicator_;
  void* stream_;
};

// Checks of arguments; they throw Refusal.
uint8_t* needed(const void* pointer, const char* name);
uint64_t bytes_of(uint64_t count, int32_t type);
void check_reduction(int32_t type, int32_t reduction);
void check_rank(const Call& call, uint32_t rank, const char* name);
// Two blocks that overlap are a fault: HCCL would read what it has written (ASSUMED).
void check_apart(const char* name, const Block& one, const Block& two);

}  // namespace npusim::hccl
