#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "shares.h"

namespace equipoise {
namespace {

using namespace nb::literals;

struct Runs {
    std::vector<std::int32_t> start, replicas, shares;

    Runs(std::size_t experts, std::size_t slots)
        : start(experts + 1), replicas(slots), shares(slots) {}

    Ids starts() const { return {start.data(), start.size()}; }
    Ids slots() const { return {replicas.data(), replicas.size()}; }
};

// Shares of one layer, by slot.
void solve_layer(Counts counts, Ids placement, std::int64_t ranks, std::int64_t sweeps,
                 std::int32_t* out) {
    Runs runs(counts.size, placement.size);
    sort_slots(placement, {runs.start.data(), runs.start.size()},
               {runs.replicas.data(), runs.replicas.size()});
    require_home(runs.starts(), "");
    solve_shares(counts, runs.starts(), runs.slots(), ranks, sweeps,
                 {runs.shares.data(), runs.shares.size()});
    for (std::size_t i = 0; i < placement.size; ++i) out[runs.replicas[i]] = runs.shares[i];
}

Matrix py_solve_shares(nb::handle counts, nb::handle placement, std::int64_t ranks,
                       std::int64_t sweeps) {
    const CountArray loads("counts", counts, 2);
    const IdArray places("placement", placement, 2);
    const std::size_t layers = loads.extent(0), slots = places.extent(1);
    require_size("placement rows", places.extent(0), layers);
    require_ranks(ranks, slots);
    require_range("sweeps", sweeps, 0, INT32_MAX);
    require_range("placement", places.view(), 0, static_cast<std::int64_t>(loads.extent(1)) - 1);
    for (std::size_t l = 0; l < layers; ++l) require_counts("counts", loads.row(l));
    Matrix shares = make_matrix(layers, slots);
    std::int32_t* out = shares.data();
    nb::gil_scoped_release unlocked;
    for (std::size_t l = 0; l < layers; ++l)
        solve_layer(loads.row(l), places.row(l), ranks, sweeps, out + l * slots);
    return shares;
}

void py_solve_cumulative(nb::handle counts, nb::handle start, nb::handle replicas,
                         std::int64_t ranks, std::int64_t sweeps, nb::handle cumulative) {
    const std::vector<std::int64_t> load = read_counts("counts", counts);
    const IdArray starts("start", start, 1), slots("replicas", replicas, 1);
    const Output out("cumulative", cumulative, 1);
    require_runs(starts.view(), slots.view());
    require_size("counts", load.size(), starts.size() - 1);
    require_size("cumulative", out.size(), slots.size());
    require_ranks(ranks, slots.size());
    require_range("sweeps", sweeps, 0, INT32_MAX);
    require_counts("counts", {load.data(), load.size()});
    nb::gil_scoped_release unlocked;
    const Counts tokens{load.data(), load.size()};
    solve_shares(tokens, starts.view(), slots.view(), ranks, sweeps, out.span());
    accumulate_runs(starts.view(), out.span());
}

}  // namespace

void bind_shares(nb::module_& m) {
    m.def("solve_shares", &py_solve_shares, "counts"_a, "placement"_a, "ranks"_a, "sweeps"_a = 16,
          "Shares by slot, in 1/65536, that level the rank loads; csrc/shares.h has the rule.");
    m.def("solve_cumulative", &py_solve_cumulative, "counts"_a, "start"_a, "replicas"_a, "ranks"_a,
          "sweeps"_a, "cumulative"_a,
          "solve_shares for one layer, straight into its routing table.");
}

}  // namespace equipoise
