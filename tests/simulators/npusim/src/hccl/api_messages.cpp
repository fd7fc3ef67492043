// The C functions of messages between two ranks.
#include <algorithm>
#include <vector>

#include "call.h"
#include "core/fault.h"
#include "links.h"
#include "refusal.h"

namespace npusim::hccl {
namespace {

// HcclSendRecvItem, by its layout (interface facts).
struct Item {
  int32_t way;  // 0: send, 1: receive
  void* buffer;
  uint64_t count;
  int32_t type;
  uint32_t peer;
};
constexpr int32_t kOutward = 0;
constexpr int32_t kInward = 1;

[[noreturn]] void refuse(const std::string& why) {
  fault(why);
  throw Refusal(kParameter, why);
}

Message message_of(Kind kind, const Item& item) {
  const Descriptor what{kind, item.type, item.count, kNone, static_cast<int32_t>(item.peer)};
  return {what, {needed(item.buffer, "a buffer"), bytes_of(item.count, item.type)}};
}

void launch_one(const Call& call, Kind kind, const Item& item) {
  check_rank(call, item.peer, "rank");
  const Message message = message_of(kind, item);
  if (message.what.root == call.rank()) {
    refuse(text("%s: a rank has no link to itself", describe(message.what).c_str()));
  }
  link_pair(call.communicator(), message.what);
  ExchangePlan plan;
  plan.name = describe(message.what);
  (kind == Kind::kSend ? plan.sends : plan.receives).push_back(message);
  call.launch(plan);
}

// At most one block each way for a pair of ranks (documentation of HcclBatchSendRecv).
void check_once(const std::vector<Message>& messages) {
  uint32_t seen = 0;
  for (const Message& message : messages) {
    const uint32_t bit = 1u << message.what.root;
    if ((seen & bit) != 0) {
      refuse(text("%s: more than one block one way for one pair of ranks in one batch",
                  describe(message.what).c_str()));
    }
    seen |= bit;
  }
}

// Pairs up what the rank sends itself, in order.
void take_own(int rank, ExchangePlan& plan) {
  const auto own = [rank](const Message& message) { return message.what.root == rank; };
  const auto sent = std::find_if(plan.sends.begin(), plan.sends.end(), own);
  const auto received = std::find_if(plan.receives.begin(), plan.receives.end(), own);
  const bool sends = sent != plan.sends.end();
  if (sends != (received != plan.receives.end())) {
    refuse(text("a batch in which rank %d sends itself something or receives it, not both", rank));
  }
  if (!sends) return;
  if (sent->what.count != received->what.count || sent->what.type != received->what.type) {
    refuse(text("a batch in which rank %d sends itself something else than it receives", rank));
  }
  plan.own.push_back({sent->block, received->block});
  plan.sends.erase(sent);
  plan.receives.erase(received);
}

// HCCL's order in a batch: by how far the receiver is below the sender, going round
// (coll_batch_send_recv_executor.cc: GetPairWiseList).
void pair_up(int rank, int ranks, ExchangePlan& plan) {
  const auto below = [=](const Message& message) {
    return (rank - message.what.root + ranks) % ranks;
  };
  const auto above = [=](const Message& message) {
    return (message.what.root - rank + ranks) % ranks;
  };
  std::sort(plan.sends.begin(), plan.sends.end(),
            [=](const Message& a, const Message& b) { return below(a) < below(b); });
  std::sort(plan.receives.begin(), plan.receives.end(),
            [=](const Message& a, const Message& b) { return above(a) < above(b); });
}

ExchangePlan plan_of(const Call& call, const Item* items, uint32_t count) {
  ExchangePlan plan;
  plan.name = text("HcclBatchSendRecv of %u items", count);
  for (const Item* item = items; item != items + count; ++item) {
    check_rank(call, item->peer, "remoteRank");
    if (item->way != kOutward && item->way != kInward) throw Refusal(kParameter, "sendRecvType");
    if (item->way == kOutward) plan.sends.push_back(message_of(Kind::kBatchSend, *item));
    if (item->way == kInward) plan.receives.push_back(message_of(Kind::kBatchReceive, *item));
  }
  check_once(plan.sends);
  check_once(plan.receives);
  take_own(call.rank(), plan);
  pair_up(call.rank(), call.size(), plan);
  return plan;
}

std::vector<int> peers_of(const ExchangePlan& plan) {
  std::vector<int> peers;
  for (const auto* const messages : {&plan.sends, &plan.receives}) {
    for (const Message& message : *messages) peers.push_back(message.what.root);
  }
  return peers;
}

// Messages of no bytes need their links and nothing else (CalcSendSlices makes no slice of them).
void drop_empty(std::vector<Message>& messages) {
  const auto empty = [](const Message& message) { return message.block.bytes == 0; };
  messages.erase(std::remove_if(messages.begin(), messages.end(), empty), messages.end());
}

}  // namespace
}  // namespace npusim::hccl

using namespace npusim::hccl;

HCCL_API int HcclSend(void* buffer, uint64_t count, int32_t type, uint32_t rank, void* communicator,
                      void* stream) {
  if (count == 0) return kSuccess;  // op_base.cc: "input count is 0, return HcclSend success"
  return guarded("HcclSend", [&] {
    const Call call(communicator, stream);
    launch_one(call, Kind::kSend, {kOutward, buffer, count, type, rank});
  });
}

HCCL_API int HcclRecv(void* buffer, uint64_t count, int32_t type, uint32_t rank, void* communicator,
                      void* stream) {
  if (count == 0) return kSuccess;
  return guarded("HcclRecv", [&] {
    const Call call(communicator, stream);
    launch_one(call, Kind::kReceive, {kInward, buffer, count, type, rank});
  });
}

HCCL_API int HcclBatchSendRecv(const void* items, uint32_t count, void* communicator,
                               void* stream) {
  if (count == 0) return kSuccess;
  return guarded("HcclBatchSendRecv", [&] {
    const Call call(communicator, stream);
    needed(items, "sendRecvInfo");
    ExchangePlan plan = plan_of(call, static_cast<const Item*>(items), count);
    link_batch(call.communicator(), peers_of(plan));
    drop_empty(plan.sends);
    drop_empty(plan.receives);
    call.launch(plan);
  });
}
