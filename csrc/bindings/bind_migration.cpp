#include <vector>

#include "bindings/bindings.h"
#include "bindings/numpy_arrays.h"
#include "migration/migration_plan.h"

namespace equipoise {
namespace {

using namespace nb::literals;

using Column = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

// Hands a vector to numpy without a copy.
Column to_numpy(std::vector<std::int32_t>&& values) {
    auto* kept = new std::vector<std::int32_t>(std::move(values));
    const nb::capsule owner(
        kept, [](void* p) noexcept { delete static_cast<std::vector<std::int32_t>*>(p); });
    return Column(kept->data(), {kept->size()}, owner);
}

// One row each for layer, slot, expert, source, staging and round, so that Python has them as
// arrays.
std::vector<std::int32_t> transpose(const std::vector<SlotMove>& moves) {
    constexpr std::int32_t SlotMove::* kRows[] = {&SlotMove::layer,   &SlotMove::slot,
                                                  &SlotMove::expert,  &SlotMove::source,
                                                  &SlotMove::staging, &SlotMove::round};
    std::vector<std::int32_t> rows;
    rows.reserve(std::size(kRows) * moves.size());
    for (const auto row : kRows)
        for (const SlotMove& move : moves) rows.push_back(move.*row);
    return rows;
}

void require_spec(const MigrationSpec& spec, std::size_t size) {
    // Moves are numbered in 32 bits, and there are as many as slots at most.
    require_range("slots of all layers", static_cast<std::int64_t>(size), 0, INT32_MAX);
    require_range("ranks % nodes", spec.ranks % spec.nodes, 0, 0);
    require_range("order", spec.order, 0, spec.layers - 1);
    const Ids before{spec.installed, size}, after{spec.proposed, size};
    require_range("installed", before, 0, spec.experts - 1);
    require_range("proposed", after, 0, spec.experts - 1);
}

MigrationSpec spec_of(const IdArray& before, const IdArray& after, const IdArray& order,
                      std::int64_t experts, std::int64_t ranks, std::int64_t nodes,
                      std::int64_t staging, std::int64_t message_slots) {
    require_size("proposed rows", after.extent(0), before.extent(0));
    require_size("proposed columns", after.extent(1), before.extent(1));
    require_range("experts", experts, 1, static_cast<std::int64_t>(before.extent(1)));
    require_ranks(ranks, before.extent(1));
    require_range("ranks", ranks, 1, static_cast<std::int64_t>(before.extent(1)));
    require_range("nodes", nodes, 1, ranks);
    require_range("staging", staging, 1, INT32_MAX);
    require_range("message_slots", message_slots, 1, INT32_MAX);
    const auto narrow = [](auto value) { return static_cast<std::int32_t>(value); };
    const MigrationSpec spec{narrow(before.extent(0)),
                             narrow(experts),
                             narrow(before.extent(1)),
                             narrow(ranks),
                             narrow(nodes),
                             before.view().data,
                             after.view().data,
                             order.view(),
                             narrow(staging),
                             narrow(message_slots)};
    require_spec(spec, before.size());
    return spec;
}

nb::tuple py_plan_migration(nb::handle installed, nb::handle proposed, nb::handle order, std::int64_t experts,
                  std::int64_t ranks, std::int64_t nodes, std::int64_t staging,
                  std::int64_t message_slots) {
    const IdArray before("installed", installed, 2), after("proposed", proposed, 2);
    const IdArray layers("order", order, 1);
    const MigrationSpec spec =
        spec_of(before, after, layers, experts, ranks, nodes, staging, message_slots);
    MigrationPlan plan;
    std::vector<std::int32_t> rows;
    {
        nb::gil_scoped_release unlocked;
        plan = make_migration_plan(spec);
        rows = transpose(plan.moves);
    }
    return nb::make_tuple(to_numpy(std::move(rows)), to_numpy(std::move(plan.receive_start)),
                          to_numpy(std::move(plan.sends)), to_numpy(std::move(plan.send_start)),
                          to_numpy(std::move(plan.chunk_start)),
                          to_numpy(std::move(plan.rounds_per_chunk)));
}

}  // namespace

void bind_migration(nb::module_& m) {
    m.def(
        "plan_migration", &py_plan_migration, "installed"_a, "proposed"_a, "order"_a, "experts"_a, "ranks"_a, "nodes"_a,
        "staging"_a, "message_slots"_a,
        "How the weights of an epoch travel; the rules stand in csrc/migration/migration_plan.h.");
}

}  // namespace equipoise
