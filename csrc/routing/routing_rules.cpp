#include "routing/routing_rules.h"

#include <algorithm>
#include <vector>

#include "routing/routing_table.h"

namespace equipoise {
namespace {

constexpr std::uint32_t kVllmMultiplier = 2654435769u;  // vLLM's multiplier
constexpr std::size_t kTensorRtBlock = 1024;            // elements of one of TensorRT-LLM's blocks

// The entry of an expert's run that a turn comes to.
std::int32_t replica_at_turn(Ids start, Ids replicas, std::int32_t expert, std::uint64_t turn) {
    const auto copies = static_cast<std::uint64_t>(start[expert + 1] - start[expert]);
    // Most experts have one copy, and a division costs more than all the rest.
    if (copies == 1) return replicas[start[expert]];
    return replicas[start[expert] + static_cast<std::int32_t>(turn % copies)];
}

}  // namespace

void route_by_row_hash(Ids ids, Ids start, Ids replicas, std::int64_t top_k, std::int64_t rows,
                       Span<std::int32_t> slots, Span<std::int32_t> counts) {
    const auto experts = static_cast<std::int32_t>(counts.size);
    const auto invalid = static_cast<std::int32_t>(replicas.size);
    std::fill(counts.begin(), counts.end(), 0);
    std::uint32_t hash = 0;  // row * kKnuth, modulo 2^32
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
    std::vector<std::int32_t> before(counts.size, 0);  // counts when the block began
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
