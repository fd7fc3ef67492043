#include "routing/routing_rules.h"

#include <algorithm>
#include <vector>

#include "routing/routing_table.h"

namespace equipoise {
namespace {

// Knuth's multiplier of vLLM's kernel: 2^32 / golden ratio.
constexpr std::uint32_t kVllmMultiplier = 2654435769u;
// Elements that one thread block of TensorRT-LLM's kernel routes, with counters of its own.
constexpr std::size_t kTensorRtBlock = 1024;

// The slot of an expert that takes a turn.
std::int32_t replica_at_turn(Ids start, Ids replicas, std::int32_t expert, std::uint64_t turn) {
    const auto copies = static_cast<std::uint64_t>(start[expert + 1] - start[expert]);
    // Most experts have one replica, and a division costs more than all the rest.
    if (copies == 1) return replicas[start[expert]];
    return replicas[start[expert] + static_cast<std::int32_t>(turn % copies)];
}

}  // namespace

void route_by_row_hash(Ids ids, Ids start, Ids replicas, std::int64_t top_k, std::int64_t rows,
                       Span<std::int32_t> slots, Span<std::int32_t> counts) {
    const auto experts = static_cast<std::int32_t>(counts.size);
    const auto invalid = static_cast<std::int32_t>(replicas.size);
    std::fill(counts.begin(), counts.end(), 0);
    // row * kVllmMultiplier modulo 2^32, kept up by additions: unsigned numbers wrap.
    std::uint32_t hash = 0;
    std::int64_t row = 0, left = top_k;
    for (std::size_t j = 0; j < ids.size; ++j, --left) {
        if (left == 0) {
            left = top_k;
            ++row;
            hash += kVllmMultiplier;
        }
        const std::int32_t id = ids[j];
        if (!is_expert(id, experts)) {
            slots[j] = invalid;
            continue;
        }
        slots[j] = replica_at_turn(start, replicas, id, hash);
        counts[id] += row < rows ? 1 : 0;
    }
}

void route_by_block_turns(Ids ids, Ids start, Ids replicas, std::int64_t offset,
                          Span<std::int32_t> slots, Span<std::int32_t> counts) {
    const auto experts = static_cast<std::int32_t>(counts.size);
    const auto invalid = static_cast<std::int32_t>(replicas.size);
    std::fill(counts.begin(), counts.end(), 0);
    // Counts when the block began: the occurrence within the block is the difference.
    std::vector<std::int32_t> before(counts.size, 0);
    std::uint64_t turn = static_cast<std::uint64_t>(offset);
    for (std::size_t j = 0; j < ids.size; ++j) {
        if (j > 0 && j % kTensorRtBlock == 0) {
            std::copy(counts.begin(), counts.end(), before.begin());
            ++turn;
        }
        const std::int32_t id = ids[j];
        if (!is_expert(id, experts)) {
            slots[j] = invalid;
            continue;
        }
        const auto earlier = static_cast<std::uint64_t>(counts[id] - before[id]);
        slots[j] = replica_at_turn(start, replicas, id, turn + earlier);
        ++counts[id];
    }
}

}  // namespace equipoise
