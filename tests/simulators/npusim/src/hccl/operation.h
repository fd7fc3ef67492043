// What collectives and messages have in common: their stages, their time limit, their fault modes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "communicator.h"
#include "core/stream.h"

namespace npusim::hccl {

// Bytes that may still be moved one way.
class Ration {
 public:
  size_t cut(uint64_t bytes) const { return static_cast<size_t>(std::min(bytes, left_)); }
  void spend(uint64_t bytes) { left_ -= std::min(bytes, left_); }
  void limit(uint64_t bytes) { left_ = bytes; }
  bool spent() const { return left_ == 0; }

 private:
  uint64_t left_ = UINT64_MAX;
};

// One operation of one rank while it runs: a task's turns.
class Operation {
 public:
  explicit Operation(Shared communicator) : communicator_(std::move(communicator)) {}
  virtual ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Throws Failure; then nothing works on the communicator any more.
  Turn turn();

 protected:
  enum class Step { kStuck, kMoved, kEnded };

  // Bytes from and to other ranks.
  virtual uint64_t bytes_out() const = 0;
  virtual uint64_t bytes_in() const = 0;
  virtual Lanes lanes() const = 0;
  virtual void announce() = 0;       // tells the others that this rank has come
  virtual bool met() = 0;            // whether all that must have come have; compares what they say
  virtual Step move() = 0;           // moves what can be moved now
  virtual std::vector<int> missing() const = 0;
  virtual std::string what() const = 0;

  [[noreturn]] void wrong(const std::string& why) const;

  const Shared communicator_;
  Ration out_;
  Ration in_;

 private:
  enum class Stage { kNew, kLate, kQueued, kMeeting, kMoving, kEnded };
  // How far the way in may go at first: an unordered reader must have the chance to see half of it.
  enum class Tearing { kNever, kBefore, kAfter };

  Turn step();
  void begin();
  Turn moving();
  Turn leave();
  Turn waiting();
  void expire();

  Stage stage_ = Stage::kNew;
  Tearing tearing_ = Tearing::kNever;
  int64_t due_ = 0;
  int64_t since_ = 0;  // nanoseconds: the begin, or the last movement
  bool doomed_ = false;
  Lanes held_;
};

// A task body; the operation is made at its first turn, so that each replay of a graph has its own.
template <typename Made, typename Plan>
Body body_of(Shared communicator, Plan plan) {
  std::shared_ptr<Made> running;
  return [communicator = std::move(communicator), plan = std::move(plan), running]() mutable {
    if (running == nullptr) running = std::make_shared<Made>(communicator, plan);
    return running->turn();
  };
}

}  // namespace npusim::hccl
