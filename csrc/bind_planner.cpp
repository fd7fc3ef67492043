#include "arrays.h"
#include "bindings.h"
#include "labels.h"
#include "planner.h"

namespace equipoise {
namespace {

using namespace nb::literals;

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
        align(before.row(l), after.row(l), ranks, {out + l * width, width});
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

}  // namespace

void bind_planner(nb::module_& m) {
    m.def("plan_greedy", &py_plan_greedy, "load"_a, "slots"_a, "ranks"_a,
          "The greedy plan of each layer; the rule stands in csrc/planner.h.");
    m.def("align", &py_align, "installed"_a, "proposed"_a, "ranks"_a,
          "`proposed`, relabelled so that few copies move; the rule stands in csrc/labels.h.");
    m.def("count_moves", &py_count_moves, "installed"_a, "proposed"_a, "ranks"_a,
          "Copies in `proposed` that their rank does not hold in `installed`.");
}

}  // namespace equipoise
