// Routes a batch so that every rank gets as many of its rows. `hal/levelled_routing.py` defines
// what it does.
#pragma once

#include "common/span.h"
#include "routing/routing_table.h"

namespace equipoise {

// The counts of ranks that divide their rows together; both empty if the batch is divided by
// itself.
struct GroupCounts {
    Ids total;   // [experts], of all ranks of the group
    Ids before;  // [experts], of those before this one
};

// Counts the batch, levels it over the ranks, and assigns its rows, in that order. `seed` is
// seed32(rank, layer, 0); the shares of the table are not read. Every expert has a replica.
void route_levelled(Ids ids, const RoutingTable& table, std::int32_t ranks, std::uint32_t seed,
                    const GroupCounts& group, Span<std::int32_t> slots, Span<std::int32_t> counts);

// Adds to `rows` [slots] what each slot gets of a batch with these counts, without its rows.
// `group`: whether it is the batch of a group, which takes more sweeps.
void add_levelled_rows(Ids counts, const RoutingTable& table, std::int32_t ranks,
                       std::uint32_t seed, bool group, Span<std::int64_t> rows);

// Writes `rows` [members, slots]: what each member of a group with these counts [members, experts]
// sends to each slot. The members' counts add up to at most 2^31 - 1.
void divide_group_rows(Ids counts, const RoutingTable& table, std::int32_t ranks,
                       std::uint32_t seed, Span<std::int64_t> rows);

}  // namespace equipoise
