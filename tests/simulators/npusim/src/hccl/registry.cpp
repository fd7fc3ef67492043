#include "registry.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/config.h"
#include "core/fault.h"
#include "core/stream.h"
#include "pause.h"
#include "refusal.h"

namespace npusim::hccl {
namespace {

struct Handles {
  std::mutex lock;
  std::map<void*, Shared> live;
};

Handles& handles() {
  static Handles* const kept = new Handles;  // outlives every thread
  return *kept;
}

void sit(Segment& segment, int rank, int device) {
  Seat& seat = segment.seat(rank);
  uint32_t empty = 0;
  if (!seat.taken.compare_exchange_strong(empty, 1)) {
    const std::string wrong = text("rank %d of a communicator comes twice: process %d and %d", rank,
                                   seat.process.load(), getpid());
    fault(wrong);
    throw Refusal(kParameter, wrong);
  }
  seat.device = device;
  seat.process = getpid();  // last: whoever sees it sees the rest
}

std::string missing(Segment& segment) {
  std::string names;
  for (int rank = 0; rank < segment.ranks(); ++rank) {
    if (segment.seat(rank).process == 0) names += text("%s%d", names.empty() ? "" : ", ", rank);
  }
  return names;
}

Phase phase(Segment& segment) { return static_cast<Phase>(segment.header().phase.load()); }

// Everybody is there, or nobody can be any more: the first one to say it is right for all.
Phase decide(Segment& segment, Phase wanted) {
  auto said = static_cast<uint32_t>(Phase::kJoining);
  segment.header().phase.compare_exchange_strong(said, static_cast<uint32_t>(wanted));
  return phase(segment);
}

void wait_for_all(Segment& segment, int rank, const Patience& patience) {
  const int64_t start = now();
  Pause pause;
  while (!missing(segment).empty() && phase(segment) == Phase::kJoining) {
    if (patience.over()) break;
    pause.sleep();
  }
  if (patience.given_up() && phase(segment) == Phase::kJoining) {
    segment.seat(rank).process = 0;
    throw Refusal(kUnavailable, text("rank %d has given up its communicator", rank));
  }
  const std::string names = missing(segment);
  const Phase said = decide(segment, names.empty() ? Phase::kComplete : Phase::kAbandoned);
  if (said == Phase::kComplete) return;
  throw Refusal(kTimeout, text("rank %d has waited for its communicator for %.1f s, of %d ranks "
                               "these have not come: %s", rank, (now() - start) / 1e9,
                               segment.ranks(),
                               names.empty() ? "none, but another gave up" : names.c_str()));
}

// Two ranks on one device are refused by every rank.
void check_devices(Segment& segment) {
  for (int one = 0; one < segment.ranks(); ++one) {
    for (int two = 0; two < one; ++two) {
      if (segment.seat(one).device != segment.seat(two).device) continue;
      throw Refusal(kParameter, text("ranks %d and %d of a communicator are on the same device %d",
                                     two, one, segment.seat(one).device.load()));
    }
  }
}

void forget(void* handle, const Communicator& found, const char* how) {
  if (tracing()) trace(text("communicator %s: %s", found.name().c_str(), how));
  std::lock_guard<std::mutex> hold(handles().lock);
  handles().live.erase(handle);
}

}  // namespace

void* join(const RootInfo& info, int ranks, int rank, int device, const Wishes& wishes,
           const std::atomic<int32_t>* given_up) {
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks) {
    throw Refusal(kParameter, text("no rank %d in a communicator of %d, of at most %d", rank, ranks,
                                   kMostRanks));
  }
  Settings settings = read_settings();
  if (wishes.execute >= 0) settings.execute = wishes.execute;
  const Patience patience(settings.connect, given_up);
  std::unique_ptr<Segment> segment = Segment::open(info, ranks, patience);
  sit(*segment, rank, device);
  wait_for_all(*segment, rank, patience);
  check_devices(*segment);
  const std::string name =
      wishes.name.empty() ? text("hccl-%016llx", static_cast<unsigned long long>(info.token))
                          : wishes.name;
  const auto made = std::make_shared<Communicator>(std::move(segment), rank, name, settings);
  if (tracing()) trace(text("communicator %s: rank %d of %d", name.c_str(), rank, ranks));
  std::lock_guard<std::mutex> hold(handles().lock);
  handles().live[made.get()] = made;
  return made.get();
}

Shared find(void* handle) {
  if (handle == nullptr) throw Refusal(kPointer, "no communicator given");
  std::lock_guard<std::mutex> hold(handles().lock);
  const auto found = handles().live.find(handle);
  if (found != handles().live.end()) return found->second;
  const std::string wrong = text("%p is no communicator, or was destroyed", handle);
  fault(wrong);
  throw Refusal(kParameter, wrong);
}

void destroy(void* handle) {
  const Shared found = find(handle);
  found->stop();
  forget(handle, *found, "destroyed");
}

void abort(void* handle) {
  const Shared found = find(handle);
  found->abort();
  forget(handle, *found, "aborted");
  npusim::nudge();
}

}  // namespace npusim::hccl
