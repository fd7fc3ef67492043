// The planner behind one C function, so that it can be built in several ways:
// test_planner_determinism.py.

#include <vector>

#include "planning/plan_layers.h"

extern "C" void plan(const std::int64_t* load, std::int64_t layers, std::int32_t experts,
                     std::int32_t slots, std::int32_t ranks, const std::int32_t* installed,
                     std::int32_t policy, const std::int32_t* aims, const std::int64_t* windows,
                     std::int64_t count, std::int32_t* placement, std::int32_t* shares) {
    using namespace equipoise;
    const std::vector<std::int32_t> capacity(ranks, kShareOne);
    const std::vector<std::int64_t> allowance(layers, std::int64_t{1} << 31);
    std::vector<std::int64_t> moves(layers), uneven(layers);
    const PlanRequest request{
        {{experts, slots, ranks}, {capacity.data(), capacity.size()}, 1, Survive::kNothing},
        static_cast<PlanPolicy>(policy),
        {aims[0], aims[1], aims[2], aims[3], aims[4], static_cast<Split>(aims[5])},
        layers,
        load,
        {windows, count, layers, experts},
        installed,
        allowance.data(),
        INT32_MAX,
        1};
    plan_layers(request, {placement, shares, moves.data(), uneven.data()});
}
