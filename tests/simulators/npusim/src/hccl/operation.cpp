#include "operation.h"

#include <unistd.h>

#include <atomic>

#include "core/config.h"
#include "core/errors.h"
#include "core/fault.h"

namespace npusim::hccl {
namespace {

constexpr int kDeath = 134;  // as a process that SIGABRT ended, seen from a shell

uint64_t count_operation() {
  static std::atomic<uint64_t> begun{0};
  return ++begun;
}

}  // namespace

Operation::~Operation() {
  if (stage_ != Stage::kMeeting && stage_ != Stage::kMoving) return;
  communicator_->fail("an operation was dropped before its end");
  communicator_->release(held_);
}

Turn Operation::turn() try {
  return step();
} catch (const Failure& failure) {
  communicator_->fail(failure.what());
  throw;
}

Turn Operation::step() {
  if (communicator_->aborted()) return leave();
  communicator_->check();
  if (stage_ == Stage::kNew) begin();
  if (stage_ == Stage::kLate) {
    if (now() < due_) return Turn::kBlocked;
    since_ = now();
    stage_ = Stage::kQueued;
  }
  if (stage_ == Stage::kQueued) {
    if (!communicator_->reserve(lanes())) return waiting();
    held_ = lanes();
    stage_ = Stage::kMeeting;
    announce();
  }
  if (stage_ == Stage::kMeeting) {
    if (!met()) return waiting();
    stage_ = Stage::kMoving;
  }
  return moving();
}

void Operation::begin() {
  const Settings& settings = communicator_->settings();
  const int self = communicator_->world_rank();
  since_ = now();
  due_ = since_ + (self == settings.slow_rank ? settings.slow : 0);
  stage_ = Stage::kLate;
  doomed_ = count_operation() == settings.doomed_operation && self == settings.doomed_rank;
  if (doomed_) {
    (bytes_out() > 0 ? out_ : in_).limit((bytes_out() > 0 ? bytes_out() : bytes_in()) / 2);
  } else if (config().mode != Mode::kEager && bytes_in() > 1) {
    tearing_ = Tearing::kBefore;
    in_.limit(bytes_in() / 2);
  }
}

Turn Operation::moving() {
  const Step step = move();
  if (doomed_ && (out_.spent() || in_.spent())) _exit(kDeath);
  if (step == Step::kEnded) {
    stage_ = Stage::kEnded;
    communicator_->release(held_);
    return Turn::kDone;
  }
  if (tearing_ == Tearing::kBefore && in_.spent()) {
    tearing_ = Tearing::kAfter;
    in_.limit(UINT64_MAX);
    since_ = now();
    return Turn::kAgain;
  }
  if (step == Step::kStuck) return waiting();
  since_ = now();
  // Where each new turn is late a long transfer would take for ever; a blocked one is asked soon.
  return config().mode == Mode::kDelay ? Turn::kBlocked : Turn::kAgain;
}

Turn Operation::leave() {
  if (stage_ == Stage::kMeeting || stage_ == Stage::kMoving) communicator_->release(held_);
  stage_ = Stage::kEnded;
  return Turn::kDone;
}

Turn Operation::waiting() {
  const int64_t limit = communicator_->settings().execute;
  if (limit > 0 && now() - since_ > limit) expire();
  return Turn::kBlocked;
}

void Operation::expire() {
  std::string names;
  bool alive = stage_ == Stage::kQueued;
  if (stage_ == Stage::kQueued) names = "another operation of this rank";
  for (const int rank : stage_ == Stage::kQueued ? std::vector<int>{} : missing()) {
    names += (names.empty() ? "" : ", ") + communicator_->peer(rank);
    alive |= communicator_->alive(rank);
  }
  const std::string why =
      text("communicator %s: %s of rank %d has waited for %.1f s, missing: %s",
           communicator_->name().c_str(), what().c_str(), communicator_->rank(),
           (now() - since_) / 1e9, names.c_str());
  // A peer may die without anybody's mistake.
  if (alive) fault(why);
  throw Failure(kDeviceException, why);
}

void Operation::wrong(const std::string& why) const {
  const std::string said = text("communicator %s: %s", communicator_->name().c_str(), why.c_str());
  fault(said);
  throw Failure(kDeviceException, said);
}

}  // namespace npusim::hccl
