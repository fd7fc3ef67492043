#include "links.h"

#include "core/config.h"
#include "core/fault.h"
#include "pause.h"
#include "refusal.h"

namespace npusim::hccl {
namespace {

using Flag = std::atomic<uint8_t>;

struct Link {
  Flag* mine;
  Flag* theirs;
  int peer;
};

std::string missing(const Communicator& communicator, const std::vector<Link>& links) {
  std::string names;
  for (const Link& link : links) {
    if (*link.theirs != 0) continue;
    names += (names.empty() ? "" : ", ") + communicator.peer(link.peer);
  }
  return names;
}

bool anyone_alive(const Communicator& communicator, const std::vector<Link>& links) {
  for (const Link& link : links) {
    if (*link.theirs == 0 && communicator.alive(link.peer)) return true;
  }
  return false;
}

bool built(const std::vector<Link>& links) {
  for (const Link& link : links) {
    if (*link.theirs == 0) return false;
  }
  return true;
}

void build(const Communicator& communicator, const char* what, const std::vector<Link>& links) {
  if (communicator.settings().links == Links::kStream) return;
  for (const Link& link : links) *link.mine = 1;
  const int64_t start = now();
  Pause pause;
  while (!built(links)) {
    if (communicator.stopped()) {
      throw Refusal(kUnavailable, text("%s: the communicator was destroyed", what));
    }
    if (now() - start > communicator.settings().connect) {
      const std::string wrong =
          text("communicator %s: rank %d has waited in %s for its first links for %.1f s, missing: %s",
               communicator.name().c_str(), communicator.rank(), what, (now() - start) / 1e9,
               missing(communicator, links).c_str());
      // A peer may die without anybody's mistake; if all live they wait for each other.
      if (anyone_alive(communicator, links)) fault(wrong);
      throw Refusal(kTimeout, wrong);
    }
    pause.sleep();
  }
}

}  // namespace

void link_all(Communicator& communicator, const Descriptor& what) {
  const auto kind = static_cast<size_t>(what.kind);
  std::vector<Link> links;
  for (int peer = 0; peer < communicator.size(); ++peer) {
    if (peer == communicator.rank()) continue;
    links.push_back({&communicator.seat(communicator.rank()).met[kind],
                     &communicator.seat(peer).met[kind], peer});
  }
  build(communicator, name_of(what.kind), links);
}

void link_pair(Communicator& communicator, const Descriptor& what) {
  const int peer = what.root;
  Seat& mine = communicator.seat(communicator.rank());
  Seat& theirs = communicator.seat(peer);
  const std::string said = describe(what);
  if (what.kind == Kind::kSend) {
    build(communicator, said.c_str(), {{&mine.to[peer], &theirs.from[communicator.rank()], peer}});
  } else {
    build(communicator, said.c_str(), {{&mine.from[peer], &theirs.to[communicator.rank()], peer}});
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
