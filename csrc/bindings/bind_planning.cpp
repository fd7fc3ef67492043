#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/numpy_arrays.h"
#include "planning/greedy.h"
#include "planning/plan_layers.h"
#include "planning/share_solver.h"
#include "planning/slot_alignment.h"

namespace equipoise {
namespace {

using namespace nb::literals;

using Column = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

Column make_column(std::size_t rows) {
    auto* data = new std::int64_t[rows]();
    const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::int64_t*>(p); });
    return Column(data, {rows}, owner);
}

// Most windows: the squared deviations of a rank then sum to 2^60 at most (kMaxDeviation of
// planning/covariance_swaps.cpp).
constexpr std::int64_t kWindows = 256;
// Largest sum of capacities, in ordinary ranks. Shifted loads have a mean below 2^14
// (LayerState::square_shift), so a rank has less than 2^31 of them above the mean, whose square
// fits into 64 bits (planning/even_split.cpp).
constexpr std::int64_t kWhole = std::int64_t{1} << 17;
// Bound of options that have none of their own, in 1 / 65536.
constexpr std::int64_t kThousand = 1000 * kShareOne;

// The arrays of a plan request, checked with each other.
struct Arrays {
    CountArray load, allowance;
    IdArray capacity;
    std::optional<CountArray> windows;
    std::optional<IdArray> installed;

    Arrays(nb::handle load_, nb::handle windows_, nb::handle allowance_, nb::handle capacity_,
           nb::handle installed_)
        : load("load", load_, 2),
          allowance("allowance", allowance_, 1),
          capacity("capacity", capacity_, 1) {
        require_size("allowance", allowance.size(), load.extent(0));
        require_capacity();
        for (std::size_t l = 0; l < load.extent(0); ++l) require_load(load.row(l));
        if (!windows_.is_none()) windows.emplace("windows", windows_, 3);
        if (!installed_.is_none()) installed.emplace("installed", installed_, 2);
    }

    void require_capacity() const {
        if (capacity.size() == 0) refuse("capacity", "a rank at least", "none");
        require_range("capacity", capacity.view(), 1, INT32_MAX);
        std::int64_t whole = 0;
        for (std::int32_t c : capacity.view()) whole += c;
        require_range("sum of capacity", whole, 1, kWhole * kShareOne);
    }

    // Throws if the load of the layer, on the rank of the least capacity, would not fit into 64
    // bits.
    void require_load(Counts row) const {
        require_counts("load", row);
        const std::int64_t sum = std::accumulate(row.begin(), row.end(), std::int64_t{0});
        require_range("load of a layer, with that capacity", sum, 0,
                      max_layer_tokens(capacity.view()));
    }

    LoadWindows checked_windows() const {
        if (!windows) return {nullptr, 0, 0, 0};
        const auto count = static_cast<std::int64_t>(windows->extent(0));
        require_range("windows", count, 1, kWindows);
        require_size("windows layers", windows->extent(1), load.extent(0));
        require_size("windows experts", windows->extent(2), load.extent(1));
        // What is left of the load is counted down, so that the sums cannot overflow.
        std::vector<std::int64_t> left(load.view().begin(), load.view().end());
        for (std::size_t i = 0; i < windows->size(); ++i) {
            require_range("windows", windows->view()[i], 0, left[i % left.size()]);
            left[i % left.size()] -= windows->view()[i];
        }
        if (std::any_of(left.begin(), left.end(), [](auto n) { return n != 0; }))
            refuse("windows", "rows that sum to the load", "less");
        return {windows->view().data, count, static_cast<std::int64_t>(load.extent(0)),
                static_cast<std::int64_t>(load.extent(1))};
    }

    void require_installed(std::int64_t slots) const {
        if (!installed) return;
        require_size("installed rows", installed->extent(0), load.extent(0));
        require_size("installed columns", installed->extent(1), static_cast<std::size_t>(slots));
        const auto experts = static_cast<std::int32_t>(load.extent(1));
        require_range("installed", installed->view(), 0, experts - 1);
        std::vector<std::uint8_t> found(experts);
        for (std::size_t l = 0; l < load.extent(0); ++l) {
            std::fill(found.begin(), found.end(), 0);
            for (std::int32_t expert : installed->row(l)) found[expert] = 1;
            const auto missing = std::find(found.begin(), found.end(), 0);
            if (missing != found.end())
                refuse("installed", "a slot for every expert",
                       "none for expert " + std::to_string(missing - found.begin()) + " in layer " +
                           std::to_string(l));
        }
    }
};

RankTopology topology_of(const Arrays& arrays, std::int64_t slots, std::int64_t nodes,
                      std::int64_t survive) {
    const auto ranks = static_cast<std::int64_t>(arrays.capacity.size());
    const auto experts = static_cast<std::int64_t>(arrays.load.extent(1));
    require_range("experts", experts, 1, INT32_MAX);
    require_range("slots", slots, experts, INT32_MAX);
    require_ranks(ranks, static_cast<std::size_t>(slots));
    require_range("nodes", nodes, 1, ranks);
    require_range("ranks % nodes", ranks % nodes, 0, 0);
    require_range("survive", survive, 0, 2);
    const LayerShape shape{static_cast<std::int32_t>(experts), static_cast<std::int32_t>(slots),
                           static_cast<std::int32_t>(ranks)};
    const RankTopology topology{shape, arrays.capacity.view(), static_cast<std::int32_t>(nodes),
                                static_cast<Survive>(survive)};
    require_range("slots", slots, experts * topology.replica_range().low,
                  experts * topology.replica_range().high);
    return topology;
}

PlanOptions options_of(nb::handle aims) {
    const IdArray values("aims", aims, 1);
    require_size("aims", values.size(), 7);
    const Ids v = values.view();
    require_range("target", v[0], 0, kThousand);
    require_range("slack", v[1], 0, kShareOne);
    require_range("hysteresis", v[2], 0, kThousand);
    // At least one: a copy from another node does not cost less than one within the node.
    require_range("node_cost", v[3], kShareOne, kThousand);
    require_range("sigma", v[4], 0, 100 * kShareOne);
    require_range("split", v[5], 0, 1);
    require_range("headroom", v[6], 0, kThousand);
    return {v[0], v[1], v[2], v[3], v[4], static_cast<Split>(v[5]), v[6]};
}

nb::tuple py_plan(nb::handle load, nb::handle windows, std::int64_t slots, nb::handle capacity,
                  std::int64_t nodes, std::int64_t survive, nb::handle installed,
                  std::int64_t policy, nb::handle aims, nb::handle allowance, std::int64_t per_rank,
                  std::int64_t threads) {
    const Arrays arrays(load, windows, allowance, capacity, installed);
    arrays.require_installed(slots);
    require_range("policy", policy, 0, 2);
    require_range("per_rank", per_rank, 0, INT32_MAX);
    require_range("threads", threads, 1, 1024);
    const std::size_t layers = arrays.load.extent(0);
    const PlanRequest request{topology_of(arrays, slots, nodes, survive),
                              static_cast<PlanPolicy>(policy),
                              options_of(aims),
                              static_cast<std::int64_t>(layers),
                              arrays.load.view().data,
                              arrays.checked_windows(),
                              arrays.installed ? arrays.installed->view().data : nullptr,
                              arrays.allowance.view().data,
                              static_cast<std::int32_t>(per_rank),
                              static_cast<std::int32_t>(threads)};
    Matrix placement = make_matrix(layers, static_cast<std::size_t>(slots));
    Matrix shares = make_matrix(layers, static_cast<std::size_t>(slots));
    Column moves = make_column(layers), uneven = make_column(layers);
    const PlanResult result{placement.data(), shares.data(), moves.data(), uneven.data()};
    {
        nb::gil_scoped_release unlocked;
        plan_layers(request, result);
    }
    return nb::make_tuple(placement, shares, moves, uneven);
}

Matrix py_plan_greedy(nb::handle load, std::int64_t slots, std::int64_t ranks) {
    const CountArray loads("load", load, 2);
    const std::size_t layers = loads.extent(0);
    require_range("load columns", static_cast<std::int64_t>(loads.extent(1)), 1, INT32_MAX);
    require_range("slots", slots, static_cast<std::int64_t>(loads.extent(1)), INT32_MAX);
    require_ranks(ranks, static_cast<std::size_t>(slots));
    for (std::size_t l = 0; l < layers; ++l) require_counts("load", loads.row(l));
    const auto width = static_cast<std::size_t>(slots);
    Matrix placement = make_matrix(layers, width);
    std::int32_t* out = placement.data();
    nb::gil_scoped_release unlocked;
    for (std::size_t l = 0; l < layers; ++l)
        plan_greedy(loads.row(l), ranks, {out + l * width, width});
    return placement;
}

void require_alike(const IdArray& installed, const IdArray& proposed, std::int64_t ranks) {
    require_size("proposed rows", proposed.extent(0), installed.extent(0));
    require_size("proposed columns", proposed.extent(1), installed.extent(1));
    require_ranks(ranks, installed.extent(1));
    require_range("installed", installed.view(), 0, INT32_MAX);
    require_range("proposed", proposed.view(), 0, INT32_MAX);
}

Matrix py_align(nb::handle installed, nb::handle proposed, std::int64_t ranks) {
    const IdArray before("installed", installed, 2), after("proposed", proposed, 2);
    require_alike(before, after, ranks);
    const std::size_t width = before.extent(1);
    Matrix aligned = make_matrix(before.extent(0), width);
    std::int32_t* out = aligned.data();
    nb::gil_scoped_release unlocked;
    for (std::size_t l = 0; l < before.extent(0); ++l)
        align_slots(before.row(l), after.row(l), ranks, {out + l * width, width});
    return aligned;
}

std::int64_t py_count_moves(nb::handle installed, nb::handle proposed, std::int64_t ranks) {
    const IdArray before("installed", installed, 2), after("proposed", proposed, 2);
    require_alike(before, after, ranks);
    nb::gil_scoped_release unlocked;
    std::int64_t moves = 0;
    for (std::size_t l = 0; l < before.extent(0); ++l)
        moves += count_moves(before.row(l), after.row(l), ranks);
    return moves;
}

// A routing table of one layer, and its shares by replica.
struct Runs {
    std::vector<std::int32_t> start, replicas, shares;

    Runs(std::size_t experts, std::size_t slots)
        : start(experts + 1), replicas(slots), shares(slots) {}

    Ids starts() const { return {start.data(), start.size()}; }
    Ids slots() const { return {replicas.data(), replicas.size()}; }
};

// Solves the shares of one layer, and writes them by slot.
void solve_layer(Counts counts, Ids placement, std::int64_t ranks, std::int64_t sweeps,
                 std::int32_t* out) {
    Runs runs(counts.size, placement.size);
    sort_slots(placement, {runs.start.data(), runs.start.size()},
               {runs.replicas.data(), runs.replicas.size()});
    require_every_expert_placed(runs.starts(), "");
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
    require_replica_runs(starts.view(), slots.view());
    require_size("counts", load.size(), starts.size() - 1);
    require_size("cumulative", out.size(), slots.size());
    require_ranks(ranks, slots.size());
    require_range("sweeps", sweeps, 0, INT32_MAX);
    require_counts("counts", {load.data(), load.size()});
    nb::gil_scoped_release unlocked;
    const Counts tokens{load.data(), load.size()};
    solve_shares(tokens, starts.view(), slots.view(), ranks, sweeps, out.span());
    accumulate_replica_shares(starts.view(), out.span());
}

}  // namespace

void bind_planning(nb::module_& m) {
    m.def("plan", &py_plan, "load"_a, "windows"_a.none(), "slots"_a, "capacity"_a, "nodes"_a,
          "survive"_a, "installed"_a.none(), "policy"_a, "aims"_a, "allowance"_a, "per_rank"_a,
          "threads"_a,
          "Placement, shares, moves and imbalance (in 1 / 65536) of each layer; "
          "csrc/planning/plan_layers.h.");
    m.def("plan_greedy", &py_plan_greedy, "load"_a, "slots"_a, "ranks"_a,
          "The greedy plan of each layer; the rule stands in csrc/planning/greedy.h.");
    m.def("align", &py_align, "installed"_a, "proposed"_a, "ranks"_a,
          "`proposed`, relabelled so that few copies move; the rule stands in "
          "csrc/planning/slot_alignment.h.");
    m.def("count_moves", &py_count_moves, "installed"_a, "proposed"_a, "ranks"_a,
          "Copies in `proposed` that their rank does not hold in `installed`.");
    m.def("solve_shares", &py_solve_shares, "counts"_a, "placement"_a, "ranks"_a, "sweeps"_a = 16,
          "Shares by slot, in 1/65536, that level the rank loads; csrc/planning/share_solver.h has "
          "the rule.");
    m.def("solve_cumulative", &py_solve_cumulative, "counts"_a, "start"_a, "replicas"_a, "ranks"_a,
          "sweeps"_a, "cumulative"_a,
          "solve_shares for one layer, straight into its routing table.");
}

}  // namespace equipoise
