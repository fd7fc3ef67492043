#include "links.h"

#include <algorithm>
#include <functional>
#include <string>

#include "core/config.h"
#include "core/fault.h"
#include "pause.h"
#include "refusal.h"

namespace npusim::hccl {
namespace {

// One condition on another rank, and the mark by which this rank fulfils the same for it.
struct Link {
  std::atomic<uint8_t>* mine;
  std::atomic<uint8_t>* theirs;
  int peer;
};

using Peers = std::vector<int>;

Peers missing(const std::vector<Link>& links) {
  Peers found;
  for (const Link& link : links) {
    if (*link.theirs == 0) found.push_back(link.peer);
  }
  return found;
}

[[noreturn]] void expire(const Communicator& communicator, const std::string& what, double seconds,
                         const Peers& peers) {
  std::string names;
  bool alive = false;
  for (const int peer : peers) {
    names += (names.empty() ? "" : ", ") + communicator.peer(peer);
    alive |= communicator.alive(peer);
  }
  const std::string wrong =
      text("communicator %s: rank %d has waited in %s for its first links for %.1f s, missing: %s",
           communicator.name().c_str(), communicator.rank(), what.c_str(), seconds, names.c_str());
  // A peer may die without anybody's mistake; if one lives they wait for each other.
  if (alive) fault(wrong);
  throw Refusal(kTimeout, wrong);
}

// Waits until nobody is missing.
void wait(const Communicator& communicator, const std::string& what,
          const std::function<Peers()>& missing) {
  const int64_t start = now();
  Pause pause;
  for (Peers peers = missing(); !peers.empty(); peers = missing()) {
    if (communicator.stopped()) {
      throw Refusal(kUnavailable, what + ": the communicator was destroyed");
    }
    const int64_t waited = now() - start;
    if (waited > communicator.settings().connect) expire(communicator, what, waited / 1e9, peers);
    pause.sleep();
  }
}

void build(const Communicator& communicator, const std::string& what,
           const std::vector<Link>& links) {
  if (communicator.settings().links == Links::kStream) return;
  for (const Link& link : links) *link.mine = 1;
  wait(communicator, what, [&] { return missing(links); });
}

bool used_before(const Seat& seat, Kind kind) {
  const Kind* const end = seat.first_uses + seat.kinds;
  return std::find(seat.first_uses, end, kind) != end;
}

// HCCL compares what the ranks want to do when it links them (op_base.cc: RecordOpPara).
void compare(const Communicator& communicator, uint32_t place) {
  const Kind mine = communicator.seat(communicator.rank()).first_uses[place];
  for (int peer = 0; peer < communicator.size(); ++peer) {
    const Kind theirs = communicator.seat(peer).first_uses[place];
    if (theirs == mine) continue;
    const std::string wrong =
        text("communicator %s: first use does not match: rank %d calls %s, rank %d calls %s",
             communicator.name().c_str(), communicator.rank(), name_of(mine), peer,
             name_of(theirs));
    fault(wrong);
    throw Refusal(kParameter, wrong);
  }
}

}  // namespace

void link_all(Communicator& communicator, const Descriptor& what) {
  Seat& seat = communicator.seat(communicator.rank());
  if (communicator.settings().links == Links::kStream || used_before(seat, what.kind)) return;
  const uint32_t place = seat.kinds;
  seat.first_uses[place] = what.kind;
  seat.kinds = place + 1;
  wait(communicator, name_of(what.kind), [&] {
    Peers found;
    for (int peer = 0; peer < communicator.size(); ++peer) {
      if (communicator.seat(peer).kinds <= place) found.push_back(peer);
    }
    return found;
  });
  compare(communicator, place);
}

void link_pair(Communicator& communicator, const Descriptor& what) {
  const int peer = what.root;
  Seat& mine = communicator.seat(communicator.rank());
  Seat& theirs = communicator.seat(peer);
  const int self = communicator.rank();
  if (what.kind == Kind::kSend) {
    build(communicator, describe(what), {{&mine.to[peer], &theirs.from[self], peer}});
  } else {
    build(communicator, describe(what), {{&mine.from[peer], &theirs.to[self], peer}});
  }
}

void link_batch(Communicator& communicator, const std::vector<int>& peers) {
  std::vector<Link> links;
  for (const int peer : peers) {
    links.push_back({&communicator.seat(communicator.rank()).batch[peer],
                     &communicator.seat(peer).batch[communicator.rank()], peer});
  }
  build(communicator, "HcclBatchSendRecv", links);
}

}  // namespace npusim::hccl
