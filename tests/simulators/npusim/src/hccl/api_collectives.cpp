// The C functions of collectives. A count of 0 is a success that puts nothing on the stream, as in
// HCCL (op_base.cc: "input count is 0"), so ranks that disagree about it do not match.
#include "call.h"
#include "refusal.h"

using namespace npusim::hccl;

HCCL_API int HcclAllReduce(void* send, void* receive, uint64_t count, int32_t type,
                           int32_t reduction, void* communicator, void* stream) {
  if (count == 0) return kSuccess;
  return guarded("HcclAllReduce", [&] {
    const Call call(communicator, stream);
    const Block from{needed(send, "sendBuf"), bytes_of(count, type)};
    const Block to{needed(receive, "recvBuf"), from.bytes};
    check_reduction(type, reduction);
    if (send != receive) check_apart("HcclAllReduce", from, to);
    CollectivePlan plan = call.plan({Kind::kAllReduce, type, count, reduction, -1});
    for (Block& block : plan.out) block = from;
    for (Block& block : plan.in) block = to;
    call.launch(plan);
  });
}

HCCL_API int HcclReduce(void* send, void* receive, uint64_t count, int32_t type, int32_t reduction,
                        uint32_t root, void* communicator, void* stream) {
  if (count == 0) return kSuccess;
  return guarded("HcclReduce", [&] {
    const Call call(communicator, stream);
    const Block from{needed(send, "sendBuf"), bytes_of(count, type)};
    const Block to{needed(receive, "recvBuf"), from.bytes};
    check_reduction(type, reduction);
    check_rank(call, root, "root");
    if (send != receive) check_apart("HcclReduce", from, to);
    const auto at = static_cast<int>(root);
    CollectivePlan plan = call.plan({Kind::kReduce, type, count, reduction, at});
    plan.out[root] = from;
    if (call.rank() == at) {
      for (Block& block : plan.in) block = to;
    }
    call.launch(plan);
  });
}

HCCL_API int HcclReduceScatter(void* send, void* receive, uint64_t count, int32_t type,
                               int32_t reduction, void* communicator, void* stream) {
  if (count == 0) return kSuccess;
  return guarded("HcclReduceScatter", [&] {
    const Call call(communicator, stream);
    const uint64_t bytes = bytes_of(count, type);
    uint8_t* const from = needed(send, "sendBuf");
    const Block to{needed(receive, "recvBuf"), bytes};
    check_reduction(type, reduction);
    if (to.address != from + bytes * call.rank()) {
      check_apart("HcclReduceScatter", {from, bytes * call.size()}, to);
    }
    CollectivePlan plan = call.plan({Kind::kReduceScatter, type, count, reduction, -1});
    for (int rank = 0; rank < call.size(); ++rank) {
      plan.out[rank] = {from + bytes * rank, bytes};
      plan.in[rank] = to;
    }
    call.launch(plan);
  });
}

HCCL_API int HcclReduceScatterV(void* send, const void* counts, const void* displacements,
                                void* receive, uint64_t count, int32_t type, int32_t reduction,
                                void* communicator, void* stream) {
  return guarded("HcclReduceScatterV", [&] {
    const Call call(communicator, stream);
    needed(counts, "sendCounts");
    needed(displacements, "sendDispls");
    const auto* const of = static_cast<const uint64_t*>(counts);
    const auto* const at = static_cast<const uint64_t*>(displacements);
    check_reduction(type, reduction);
    if (of[call.rank()] != count) throw Refusal(kParameter, "recvCount is not the own sendCount");
    CollectivePlan plan = call.plan({Kind::kReduceScatterV, type, 0, reduction, -1});
    const Block to{static_cast<uint8_t*>(receive), bytes_of(count, type)};
    for (int rank = 0; rank < call.size(); ++rank) {
      auto* const from = static_cast<uint8_t*>(send) + bytes_of(at[rank], type);
      plan.out[rank] = {from, bytes_of(of[rank], type)};
      plan.in[rank] = to;
      if (from != to.address) check_apart("HcclReduceScatterV", plan.out[rank], to);
    }
    call.launch(plan);
  });
}

HCCL_API int HcclAllGather(void* send, void* receive, uint64_t count, int32_t type,
                           void* communicator, void* stream) {
  if (count == 0) return kSuccess;
  return guarded("HcclAllGather", [&] {
    const Call call(communicator, stream);
    const Block from{needed(send, "sendBuf"), bytes_of(count, type)};
    uint8_t* const to = needed(receive, "recvBuf");
    if (from.address != to + from.bytes * call.rank()) {
      check_apart("HcclAllGather", from, {to, from.bytes * call.size()});
    }
    CollectivePlan plan = call.plan({Kind::kAllGather, type, count, kNone, -1});
    for (int rank = 0; rank < call.size(); ++rank) {
      plan.out[rank] = from;
      plan.in[rank] = {to + from.bytes * rank, from.bytes};
    }
    call.launch(plan);
  });
}

HCCL_API int HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts,
                            const void* displacements, int32_t type, void* communicator,
                            void* stream) {
  return guarded("HcclAllGatherV", [&] {
    const Call call(communicator, stream);
    needed(counts, "recvCounts");
    needed(displacements, "recvDispls");
    const auto* const of = static_cast<const uint64_t*>(counts);
    const auto* const at = static_cast<const uint64_t*>(displacements);
    if (of[call.rank()] != count) throw Refusal(kParameter, "sendCount is not the own recvCount");
    const Block from{static_cast<uint8_t*>(send), bytes_of(count, type)};
    CollectivePlan plan = call.plan({Kind::kAllGatherV, type, 0, kNone, -1});
    for (int rank = 0; rank < call.size(); ++rank) {
      auto* const to = static_cast<uint8_t*>(receive) + bytes_of(at[rank], type);
      plan.out[rank] = from;
      plan.in[rank] = {to, bytes_of(of[rank], type)};
      if (rank != call.rank() || to != from.address) {
        check_apart("HcclAllGatherV", from, plan.in[rank]);
      }
    }
    call.launch(plan);
  });
}

HCCL_API int HcclBroadcast(void* buffer, uint64_t count, int32_t type, uint32_t root,
                           void* communicator, void* stream) {
  if (count == 0) return kSuccess;
  return guarded("HcclBroadcast", [&] {
    const Call call(communicator, stream);
    const Block block{needed(buffer, "buf"), bytes_of(count, type)};
    check_rank(call, root, "root");
    const auto at = static_cast<int>(root);
    CollectivePlan plan = call.plan({Kind::kBroadcast, type, count, kNone, at});
    if (call.rank() != at) {
      plan.in[root] = block;
    } else {
      for (Block& to : plan.out) to = block;
    }
    call.launch(plan);
  });
}

HCCL_API int HcclScatter(void* send, void* receive, uint64_t count, int32_t type, uint32_t root,
                         void* communicator, void* stream) {
  if (count == 0) return kSuccess;
  return guarded("HcclScatter", [&] {
    const Call call(communicator, stream);
    check_rank(call, root, "root");
    const auto at = static_cast<int>(root);
    const Block to{needed(receive, "recvBuf"), bytes_of(count, type)};
    CollectivePlan plan = call.plan({Kind::kScatter, type, count, kNone, at});
    plan.in[root] = to;
    if (call.rank() == at) {
      uint8_t* const from = needed(send, "sendBuf");
      if (to.address != from + to.bytes * root) {
        check_apart("HcclScatter", {from, to.bytes * call.size()}, to);
      }
      for (int rank = 0; rank < call.size(); ++rank) {
        plan.out[rank] = {from + to.bytes * rank, to.bytes};
      }
    }
    call.launch(plan);
  });
}

HCCL_API int HcclBarrier(void* communicator, void* stream) {
  return guarded("HcclBarrier", [&] {
    const Call call(communicator, stream);
    call.launch(call.plan({Kind::kBarrier, kInt8, 0, kNone, -1}));
  });
}
