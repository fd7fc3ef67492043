#include "routing/route.h"

#include <algorithm>
#include <vector>

#include "common/hash.h"

namespace equipoise {
namespace {

// The replica that takes the next `left` occurrences of an expert.
struct ReplicaCursor {
    std::int32_t replica;
    std::int32_t left;
};

// Quotas are computed when a replica is reached, not for all replicas at once: most experts of a
// batch occur a few times only.
class ReplicaQuotas {
 public:
    ReplicaQuotas(const RoutingTable& table, std::uint32_t seed, Ids counts)
        : table_(table), seed_(seed), counts_(counts), cursors_(counts.size) {
        for (std::size_t e = 0; e < counts.size; ++e) {
            const std::int32_t first = table.start[e];
            cursors_[e] = {first, counts[e] > 0 ? quota(first, static_cast<int>(e)) : 0};
        }
    }

    // May be called counts[e] times for expert e. Its quotas sum to that, so the loop finds a
    // replica with something left before the run ends.
    std::int32_t next_slot(std::int32_t expert) {
        ReplicaCursor& cursor = cursors_[expert];
        while (cursor.left == 0) cursor.left = quota(++cursor.replica, expert);
        --cursor.left;
        return table_.replicas[cursor.replica];
    }

 private:
    // The difference of two rounded bounds: the quotas of an expert sum to its count exactly, and
    // each is within one of its exact share.
    std::int32_t quota(std::int32_t replica, std::int32_t expert) const {
        const bool first = replica == table_.start[expert];
        const std::int64_t below = first ? 0 : table_.cumulative[replica - 1];
        return quota_bound(table_.cumulative[replica], expert) - quota_bound(below, expert);
    }

    // The dither, less than one row, makes ranks and layers round differently, so that their
    // roundings do not add up on one replica.
    std::int32_t quota_bound(std::int64_t cumulative, std::int32_t expert) const {
        const std::uint32_t dither = absorb32(seed_, static_cast<std::uint32_t>(expert)) >> 16;
        return static_cast<std::int32_t>((cumulative * counts_[expert] + dither) >> 16);
    }

    const RoutingTable& table_;
    std::uint32_t seed_;
    Ids counts_;
    std::vector<ReplicaCursor> cursors_;
};

}  // namespace

void count_experts(Ids ids, Span<std::int32_t> counts) {
    const auto experts = static_cast<std::int32_t>(counts.size);
    std::fill(counts.begin(), counts.end(), 0);
    for (std::int32_t id : ids)
        if (is_expert(id, experts)) ++counts[id];
}

void route_hashed(Ids ids, const RoutingTable& table, std::uint32_t begin, Span<std::int32_t> slots,
                  Span<std::int32_t> counts) {
    const std::int32_t experts = table.experts();
    // One sequence for all ranks, layers and steps, of which `begin` chooses a window.
    const std::uint32_t sequence = seed32(0, 0, 0);
    std::fill(counts.begin(), counts.end(), 0);
    for (std::size_t j = 0; j < ids.size; ++j) {
        const std::int32_t id = ids[j];
        if (!is_expert(id, experts)) {
            slots[j] = table.slots();
            continue;
        }
        ++counts[id];
        // One of 256 positions, and the middle of it: devices look positions up in a table.
        const std::uint32_t position =
            absorb32(sequence, begin + static_cast<std::uint32_t>(j)) >> 24;
        const auto draw = static_cast<std::int32_t>(position * 256 + 128);
        std::int32_t replica = table.start[id];
        // Ends within the run: the last cumulative share is 65536, above every draw.
        while (table.cumulative[replica] <= draw) ++replica;
        slots[j] = table.replicas[replica];
    }
}

void route_apportioned(Ids ids, const RoutingTable& table, std::uint32_t seed,
                       Span<std::int32_t> slots, Span<std::int32_t> counts) {
    count_experts(ids, counts);
    ReplicaQuotas quotas(table, seed, {counts.data, counts.size});
    for (std::size_t j = 0; j < ids.size; ++j)
        slots[j] = is_expert(ids[j], table.experts()) ? quotas.next_slot(ids[j]) : table.slots();
}

}  // namespace equipoise
