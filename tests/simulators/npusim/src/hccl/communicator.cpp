#include "communicator.h"

#include <cstdio>
#include <cstring>
#include <utility>

#include "core/errors.h"
#include "core/fault.h"

namespace npusim::hccl {
namespace {

// The world rank for fault modes: as the environment says, else the rank in the first communicator
// that this process joined.
int world_rank_of(const Settings& settings, int rank) {
  static std::atomic<int> first{-1};
  if (settings.world_rank >= 0) return settings.world_rank;
  int unset = -1;
  first.compare_exchange_strong(unset, rank);
  return first;
}

}  // namespace

bool process_alive(int process) {
  FILE* const file = fopen(text("/proc/%d/stat", process).c_str(), "re");
  if (file == nullptr) return false;
  char line[512] = {};
  const size_t length = fread(line, 1, sizeof(line) - 1, file);
  fclose(file);
  // The state follows the name, which stands in brackets and may hold anything.
  const char* const end = length == 0 ? nullptr : strrchr(line, ')');
  return end != nullptr && end[1] == ' ' && end[2] != 'Z' && end[2] != 'X';
}

Communicator::Communicator(std::unique_ptr<Segment> segment, int rank, std::string name,
                           const Settings& settings)
    : segment_(std::move(segment)),
      rank_(rank),
      name_(std::move(name)),
      settings_(settings),
      world_rank_(world_rank_of(settings, rank)),
      sent_(static_cast<size_t>(segment_->ranks())),
      received_(static_cast<size_t>(segment_->ranks())) {}

bool Communicator::alive(int rank) const {
  const int process = seat(rank).process.load();
  return process != 0 && process_alive(process);
}

std::string Communicator::peer(int rank) const {
  return text("rank %d (process %d%s)", rank, seat(rank).process.load(),
              alive(rank) ? "" : ", dead");
}

void Communicator::check() const {
  if (stopped_) {
    throw Failure(kDeviceException, text("communicator %s was destroyed: terminating the operation",
                                         name_.c_str()));
  }
  if (failure_.empty()) return;
  throw Failure(kDeviceException, text("communicator %s has failed before: %s", name_.c_str(),
                                       failure_.c_str()));
}

void Communicator::fail(const std::string& why) {
  if (failure_.empty()) failure_ = why;
}

bool Communicator::reserve(Lanes lanes) {
  if ((busy_.out & lanes.out) != 0 || (busy_.in & lanes.in) != 0) return false;
  busy_.out |= lanes.out;
  busy_.in |= lanes.in;
  return true;
}

void Communicator::release(Lanes lanes) {
  busy_.out &= ~lanes.out;
  busy_.in &= ~lanes.in;
}

}  // namespace npusim::hccl
