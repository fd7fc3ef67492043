// The C functions in which every rank gives every rank something of its own.
#include <vector>

#include "call.h"
#include "core/fault.h"
#include "refusal.h"

namespace npusim::hccl {
namespace {

// Where blocks begin and how many elements they have.
struct Split {
  std::vector<uint64_t> counts;
  std::vector<uint64_t> starts;
};

Split even(int ranks, uint64_t count) {
  Split split;
  for (int rank = 0; rank < ranks; ++rank) {
    split.counts.push_back(count);
    split.starts.push_back(count * static_cast<uint64_t>(rank));
  }
  return split;
}

Split given(int ranks, const void* counts, const void* starts) {
  const auto* const of = static_cast<const uint64_t*>(counts);
  const auto* const at = static_cast<const uint64_t*>(starts);
  return {{of, of + ranks}, {at, at + ranks}};
}

// One after the other; `step` apart in a matrix of counts.
Split packed(int ranks, const uint64_t* counts, size_t step) {
  Split split;
  uint64_t start = 0;
  for (int rank = 0; rank < ranks; ++rank, counts += step) {
    split.counts.push_back(*counts);
    split.starts.push_back(start);
    start += *counts;
  }
  return split;
}

std::vector<Block> blocks(const void* buffer, const Split& split, int32_t type) {
  std::vector<Block> made;
  for (size_t rank = 0; rank < split.counts.size(); ++rank) {
    const uint64_t bytes = bytes_of(split.counts[rank], type);
    if (bytes > 0) needed(buffer, "a buffer");
    auto* const start = static_cast<uint8_t*>(const_cast<void*>(buffer));
    made.push_back({bytes > 0 ? start + bytes_of(split.starts[rank], type) : nullptr, bytes});
  }
  return made;
}

void launch(const Call& call, const Descriptor& what, std::vector<Block> out,
            std::vector<Block> in) {
  for (const Block& from : out) {
    for (const Block& to : in) check_apart(name_of(what.kind), from, to);
  }
  const auto rank = static_cast<size_t>(call.rank());
  if (out[rank].bytes != in[rank].bytes) {
    const std::string wrong = text("%s: rank %d gives itself %llu bytes and takes %llu",
                                   name_of(what.kind), call.rank(),
                                   static_cast<unsigned long long>(out[rank].bytes),
                                   static_cast<unsigned long long>(in[rank].bytes));
    fault(wrong);
    throw Refusal(kParameter, wrong);
  }
  call.launch(CollectivePlan{what, std::move(out), std::move(in)});
}

void check_types(int32_t send, int32_t receive) {
  if (send != receive) throw Refusal(kParameter, "sendType and recvType differ");
}

}  // namespace
}  // namespace npusim::hccl

using namespace npusim::hccl;

HCCL_API int HcclAlltoAll(const void* send, uint64_t send_count, int32_t send_type,
                          const void* receive, uint64_t receive_count, int32_t receive_type,
                          void* communicator, void* stream) {
  if (send_count == 0 && receive_count == 0) return kSuccess;
  return guarded("HcclAlltoAll", [&] {
    const Call call(communicator, stream);
    check_types(send_type, receive_type);
    if (send_count != receive_count) throw Refusal(kParameter, "sendCount and recvCount differ");
    const Split split = even(call.size(), send_count);
    launch(call, {Kind::kAllToAll, send_type, send_count, kNone, -1},
           blocks(send, split, send_type), blocks(receive, split, receive_type));
  });
}

HCCL_API int HcclAlltoAllV(const void* send, const void* send_counts, const void* send_starts,
                           int32_t send_type, const void* receive, const void* receive_counts,
                           const void* receive_starts, int32_t receive_type, void* communicator,
                           void* stream) {
  return guarded("HcclAlltoAllV", [&] {
    const Call call(communicator, stream);
    needed(send_counts, "sendCounts");
    needed(send_starts, "sdispls");
    needed(receive_counts, "recvCounts");
    needed(receive_starts, "rdispls");
    check_types(send_type, receive_type);
    launch(call, {Kind::kAllToAllV, send_type, 0, kNone, -1},
           blocks(send, given(call.size(), send_counts, send_starts), send_type),
           blocks(receive, given(call.size(), receive_counts, receive_starts), receive_type));
  });
}

HCCL_API int HcclAlltoAllVC(const void* send, const void* matrix, int32_t send_type,
                            const void* receive, int32_t receive_type, void* communicator,
                            void* stream) {
  return guarded("HcclAlltoAllVC", [&] {
    const Call call(communicator, stream);
    needed(matrix, "sendCountMatrix");
    check_types(send_type, receive_type);
    const auto ranks = static_cast<size_t>(call.size());
    const auto rank = static_cast<size_t>(call.rank());
    const auto* const counts = static_cast<const uint64_t*>(matrix);  // [from, to]
    launch(call, {Kind::kAllToAllVC, send_type, 0, kNone, -1},
           blocks(send, packed(call.size(), counts + rank * ranks, 1), send_type),
           blocks(receive, packed(call.size(), counts + rank, ranks), receive_type));
  });
}
