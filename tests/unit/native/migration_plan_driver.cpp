// The migration plan behind one C function, so that it can be built in several ways:
// test_migration_plan.py.

#include <algorithm>

#include "migration/migration_plan.h"

// Writes five values a move, in order, and returns how many rounds all chunks have.
extern "C" std::int32_t plan_migration(const std::int32_t* installed, const std::int32_t* proposed,
                             const std::int32_t* order, const std::int32_t* sizes,
                             std::int32_t* out) {
    using namespace equipoise;
    const MigrationSpec spec{
        sizes[0], sizes[1],  sizes[2], sizes[3],
        sizes[4], installed, proposed, {order, static_cast<std::size_t>(sizes[0])},
        sizes[5], sizes[6]};
    const MigrationPlan plan = equipoise::make_migration_plan(spec);
    for (const SlotMove& move : plan.moves)
        for (std::int32_t value : {move.layer, move.slot, move.source, move.round, move.staging})
            *out++ = value;
    std::int32_t rounds = 0;
    for (std::int32_t count : plan.rounds_per_chunk) rounds += count;
    return rounds;
}
