#include "exchange.h"

#include <cstring>
#include <utility>

#include "core/fault.h"
#include "core/memory.h"

namespace npusim::hccl {
namespace {

uint64_t total(const std::vector<Message>& messages) {
  uint64_t bytes = 0;
  for (const Message& message : messages) bytes += message.block.bytes;
  return bytes;
}

uint32_t peers(const std::vector<Message>& messages) {
  uint32_t bits = 0;
  for (const Message& message : messages) bits |= 1u << message.what.root;
  return bits;
}

Kind other_end(Kind kind) {
  if (kind == Kind::kSend) return Kind::kReceive;
  if (kind == Kind::kReceive) return Kind::kSend;
  return kind == Kind::kBatchSend ? Kind::kBatchReceive : Kind::kBatchSend;
}

}  // namespace

Exchange::Exchange(Shared communicator, ExchangePlan plan)
    : Operation(std::move(communicator)), plan_(std::move(plan)) {}

uint64_t Exchange::bytes_out() const { return total(plan_.sends); }

uint64_t Exchange::bytes_in() const { return total(plan_.receives); }

Lanes Exchange::lanes() const { return {peers(plan_.sends), peers(plan_.receives)}; }

std::string Exchange::what() const { return plan_.name; }

void Exchange::announce() {
  for (const OwnCopy& copy : plan_.own) {
    const uint8_t* const from = host(copy.from.address, copy.from.bytes, plan_.name.c_str());
    memmove(host(copy.to.address, copy.to.bytes, plan_.name.c_str()), from, copy.from.bytes);
  }
}

std::vector<int> Exchange::missing() const {
  std::vector<int> found;
  if (sending_.index < plan_.sends.size()) found.push_back(plan_.sends[sending_.index].what.root);
  if (receiving_.index == plan_.receives.size()) return found;
  const int peer = plan_.receives[receiving_.index].what.root;
  if (found.empty() || found[0] != peer) found.push_back(peer);
  return found;
}

Operation::Step Exchange::move() {
  bool moved = false;
  if (sending_.index < plan_.sends.size()) moved |= send();
  if (receiving_.index < plan_.receives.size()) moved |= receive();
  if (sending_.index == plan_.sends.size() && receiving_.index == plan_.receives.size()) {
    return Step::kEnded;
  }
  return moved ? Step::kMoved : Step::kStuck;
}

bool Exchange::send() {
  const Message& message = plan_.sends[sending_.index];
  const uint64_t bytes = message.block.bytes;
  if (sending_.number == 0) offer(message);
  Lane& lane = communicator_->out(message.what.root);
  if (!meet(message, sending_, lane.wanted, lane.wants)) return false;
  const size_t wanted = out_.cut(bytes - sending_.done);
  if (wanted > 0 && lane.room() > 0) {
    const uint8_t* const from = host(message.block.address, bytes, plan_.name.c_str());
    const size_t done = lane.put(from + sending_.done, wanted);
    sending_.done += done;
    out_.spend(done);
    return true;
  }
  if (sending_.done < bytes || lane.waiting() > 0) return false;
  sending_ = {sending_.index + 1, 0, false, 0};
  return true;
}

bool Exchange::receive() {
  const Message& message = plan_.receives[receiving_.index];
  const uint64_t bytes = message.block.bytes;
  if (receiving_.number == 0) want(message);
  Lane& lane = communicator_->in(message.what.root);
  if (!meet(message, receiving_, lane.offered, lane.offers)) return false;
  const size_t wanted = in_.cut(bytes - receiving_.done);
  if (wanted == 0 || lane.waiting() == 0) return false;
  uint8_t* const to = host(message.block.address, bytes, plan_.name.c_str());
  const size_t done = lane.take(to + receiving_.done, wanted);
  receiving_.done += done;
  in_.spend(done);
  if (receiving_.done == bytes) receiving_ = {receiving_.index + 1, 0, false, 0};
  return true;
}

void Exchange::offer(const Message& message) {
  sending_.number = communicator_->next_sent(message.what.root);
  Lane& lane = communicator_->out(message.what.root);
  lane.offers[sending_.number % 2] = message.what;
  lane.offered.store(sending_.number, std::memory_order_release);
}

void Exchange::want(const Message& message) {
  receiving_.number = communicator_->next_received(message.what.root);
  Lane& lane = communicator_->in(message.what.root);
  lane.wants[receiving_.number % 2] = message.what;
  lane.wanted.store(receiving_.number, std::memory_order_release);
}

// Whether the other end has announced the message, too. Two descriptors are kept for each lane, so
// that of a message which did not match can still be read when its rank has gone on.
bool Exchange::meet(const Message& message, Head& head, const std::atomic<uint64_t>& said,
                    const Descriptor* theirs) {
  if (head.met) return true;
  if (said.load(std::memory_order_acquire) < head.number) return false;
  compare(message, theirs[head.number % 2]);
  head.met = true;
  return true;
}

void Exchange::compare(const Message& mine, const Descriptor& theirs) const {
  const Descriptor& what = mine.what;
  if (theirs.kind == other_end(what.kind) && theirs.type == what.type &&
      theirs.count == what.count) {
    return;
  }
  wrong(text("the ends of a message do not match: rank %d calls %s; rank %d calls %s",
             communicator_->rank(), describe(what).c_str(), what.root, describe(theirs).c_str()));
}

}  // namespace npusim::hccl
