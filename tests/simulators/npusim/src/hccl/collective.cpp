#include "collective.h"

#include <cstring>
#include <utility>

#include "core/fault.h"
#include "core/memory.h"
#include "reduce.h"

namespace npusim::hccl {
namespace {

constexpr size_t kPiece = 16 << 10;  // bytes that are reduced at a time

std::string said_by(int rank, const Post& post, int other) {
  return text("rank %d calls %s with %llu bytes to and %llu bytes from rank %d", rank,
              describe(post.what).c_str(), static_cast<unsigned long long>(post.to[other]),
              static_cast<unsigned long long>(post.from[other]), other);
}

}  // namespace

Collective::Collective(Shared communicator, CollectivePlan plan)
    : Operation(std::move(communicator)),
      plan_(std::move(plan)),
      self_(communicator_->rank()),
      sent_(plan_.out.size()),
      landed_(plan_.in.size()) {}

uint64_t Collective::total(const std::vector<Block>& blocks) const {
  uint64_t bytes = 0;
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    if (rank != self_) bytes += blocks[rank].bytes;
  }
  return bytes;
}

Lanes Collective::lanes() const { return {UINT32_MAX, UINT32_MAX}; }

std::string Collective::what() const {
  return text("%s (collective %llu)", describe(plan_.what).c_str(),
              static_cast<unsigned long long>(number_));
}

void Collective::announce() {
  number_ = communicator_->next_collective();
  Seat& seat = communicator_->seat(self_);
  // Nobody reads the one before the last any more: all have begun the last, so ended that one.
  Post& post = seat.posts[number_ % 2];
  post.what = plan_.what;
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    post.to[rank] = plan_.out[rank].bytes;
    post.from[rank] = plan_.in[rank].bytes;
  }
  seat.posted.store(number_, std::memory_order_release);
}

bool Collective::met() {
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    if (communicator_->seat(rank).posted.load(std::memory_order_acquire) < number_) return false;
  }
  for (int rank = 0; rank < communicator_->size(); ++rank) compare(rank);
  return true;
}

void Collective::compare(int rank) const {
  const Post& mine = communicator_->seat(self_).posts[number_ % 2];
  const Post& theirs = communicator_->seat(rank).posts[number_ % 2];
  const bool sizes = theirs.to[self_] == mine.from[rank] && theirs.from[self_] == mine.to[rank];
  if (rank == self_ || (mine.what == theirs.what && sizes)) return;
  wrong(text("collective %llu does not match: %s; %s", static_cast<unsigned long long>(number_),
             said_by(self_, mine, rank).c_str(), said_by(rank, theirs, self_).c_str()));
}

std::vector<int> Collective::missing() const {
  std::vector<int> found;
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    const bool here = communicator_->seat(rank).posted.load() >= number_;
    const bool done = sent_[rank] == plan_.out[rank].bytes && landed_[rank] == plan_.in[rank].bytes;
    if (rank != self_ && (!here || !done)) found.push_back(rank);
  }
  return found;
}

Operation::Step Collective::move() {
  bool moved = false;
  const bool reducing = plan_.what.reduction != kNone;
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    if (rank != self_) moved |= send(rank);
    if (rank != self_ && !reducing) moved |= place(rank);
  }
  moved |= reducing ? reduce() : copy_own();
  if (ended()) return Step::kEnded;
  return moved ? Step::kMoved : Step::kStuck;
}

bool Collective::ended() const {
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    if (rank != self_ && sent_[rank] < plan_.out[rank].bytes) return false;
    if (landed_[rank] < plan_.in[rank].bytes) return false;
  }
  return true;
}

bool Collective::send(int rank) {
  const Block& block = plan_.out[rank];
  const size_t wanted = out_.cut(block.bytes - sent_[rank]);
  Lane& lane = communicator_->out(rank);
  if (wanted == 0 || lane.room() == 0) return false;
  const uint8_t* const from = host(block.address, block.bytes, name_of(plan_.what.kind));
  const size_t done = lane.put(from + sent_[rank], wanted);
  sent_[rank] += done;
  out_.spend(done);
  return true;
}

bool Collective::place(int rank) {
  const Block& block = plan_.in[rank];
  const size_t wanted = in_.cut(block.bytes - landed_[rank]);
  Lane& lane = communicator_->in(rank);
  if (wanted == 0 || lane.waiting() == 0) return false;
  uint8_t* const to = host(block.address, block.bytes, name_of(plan_.what.kind));
  const size_t done = lane.take(to + landed_[rank], wanted);
  landed_[rank] += done;
  in_.spend(done);
  return true;
}

bool Collective::copy_own() {
  const Block& to = plan_.in[self_];
  if (landed_[self_] == to.bytes) return false;
  const char* const name = name_of(plan_.what.kind);
  const uint8_t* const from = host(plan_.out[self_].address, to.bytes, name);
  memmove(host(to.address, to.bytes, name), from, to.bytes);
  landed_[self_] = to.bytes;
  return true;
}

// How many bytes all ranks have given, and this one has sent to everybody who needs them: the
// result may land where they came from.
size_t Collective::reducible_now() const {
  const size_t element = size_of(plan_.what.type);
  const uint64_t done = landed_[self_];
  uint64_t bytes = std::min<uint64_t>(plan_.in[self_].bytes - done, kPiece);
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    if (rank == self_) continue;
    bytes = std::min<uint64_t>(bytes, communicator_->in(rank).waiting());
    if (sent_[rank] < plan_.out[rank].bytes) bytes = std::min(bytes, sent_[rank] - done);
    // A ration counts what comes from all peers, and a piece of it is at least one element.
    const auto peers = static_cast<uint64_t>(communicator_->size() - 1);
    bytes = std::min(bytes, in_.cut(bytes * peers) / peers + element);
  }
  return bytes / element * element;
}

bool Collective::reduce() {
  if (landed_[self_] == plan_.in[self_].bytes) return false;
  const size_t bytes = reducible_now();
  if (bytes == 0) return false;
  const char* const name = name_of(plan_.what.kind);
  const Block& own = plan_.out[self_];
  const uint8_t* const mine = host(own.address, own.bytes, name) + landed_[self_];
  uint8_t result[kPiece];
  uint8_t theirs[kPiece];
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    const uint8_t* from = mine;
    if (rank != self_) {
      communicator_->in(rank).take(theirs, bytes);
      in_.spend(bytes);
      from = theirs;
    }
    if (rank == 0) memcpy(result, from, bytes);
    if (rank > 0) combine(plan_.what.type, plan_.what.reduction, result, from, bytes);
  }
  const Block& to = plan_.in[self_];
  memcpy(host(to.address, to.bytes, name) + landed_[self_], result, bytes);
  for (uint64_t& landed : landed_) landed += bytes;
  return true;
}

}  // namespace npusim::hccl
