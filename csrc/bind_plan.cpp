#include <algorithm>
#include <numeric>
#include <optional>

#include "arrays.h"
#include "bindings.h"
#include "plan.h"

namespace equipoise {
namespace {

using namespace nb::literals;

using Column = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

Column make_column(std::size_t rows) {
    auto* data = new std::int64_t[rows]();
    const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::int64_t*>(p); });
    return Column(data, {rows}, owner);
}

// As many as the squares of deviations can be summed of: csrc/risk.cpp.
constexpr std::int64_t kWindows = 256;
// All capacities together, in ordinary ranks: with more the squares of what a rank has above the
// mean do not fit into 64 bits (csrc/even.cpp).
constexpr std::int64_t kWhole = std::int64_t{1} << 17;
// Of aims that have no bound of their own, in 1 / 65536.
constexpr std::int64_t kThousand = 1000 * kShareOne;

// The arrays of a request, checked against each other.
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

    // Raises ValueError where loads, relative to the least capacity, do not fit into 64 bits.
    void require_load(Counts row) const {
        require_counts("load", row);
        const std::int64_t sum = std::accumulate(row.begin(), row.end(), std::int64_t{0});
        require_range("load of a layer, with that capacity", sum, 0, most_tokens(capacity.view()));
    }

    Windows checked_windows() const {
        if (!windows) return {nullptr, 0, 0, 0};
        const auto count = static_cast<std::int64_t>(windows->extent(0));
        require_range("windows", count, 1, kWindows);
        require_size("windows layers", windows->extent(1), load.extent(0));
        require_size("windows experts", windows->extent(2), load.extent(1));
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
                       "none for expert " + std::to_string(missing - found.begin()) +
                           " in layer " + std::to_string(l));
        }
    }
};

Rules rules_of(const Arrays& arrays, std::int64_t slots, std::int64_t nodes, std::int64_t apart) {
    const auto ranks = static_cast<std::int64_t>(arrays.capacity.size());
    const auto experts = static_cast<std::int64_t>(arrays.load.extent(1));
    require_range("experts", experts, 1, INT32_MAX);
    require_range("slots", slots, experts, INT32_MAX);
    require_ranks(ranks, static_cast<std::size_t>(slots));
    require_range("nodes", nodes, 1, ranks);
    require_range("ranks % nodes", ranks % nodes, 0, 0);
    require_range("survive", apart, 0, 2);
    const Shape shape{static_cast<std::int32_t>(experts), static_cast<std::int32_t>(slots),
                      static_cast<std::int32_t>(ranks)};
    const Rules rules{shape, arrays.capacity.view(), static_cast<std::int32_t>(nodes),
                      static_cast<Apart>(apart)};
    require_range("slots", slots, experts * rules.copies().low, experts * rules.copies().high);
    return rules;
}

Aims aims_of(nb::handle aims) {
    const IdArray values("aims", aims, 1);
    require_size("aims", values.size(), 6);
    const Ids v = values.view();
    require_range("target", v[0], 0, kThousand);
    require_range("slack", v[1], 0, kShareOne);
    require_range("hysteresis", v[2], 0, kThousand);
    // A copy from another node costs as much as one from within at least.
    require_range("node_cost", v[3], kShareOne, kThousand);
    require_range("sigma", v[4], 0, 100 * kShareOne);
    require_range("split", v[5], 0, 1);
    return {v[0], v[1], v[2], v[3], v[4], static_cast<Split>(v[5])};
}

nb::tuple py_plan(nb::handle load, nb::handle windows, std::int64_t slots, nb::handle capacity,
                  std::int64_t nodes, std::int64_t survive, nb::handle installed,
                  std::int64_t policy, nb::handle aims, nb::handle allowance,
                  std::int64_t per_rank, std::int64_t threads) {
    const Arrays arrays(load, windows, allowance, capacity, installed);
    arrays.require_installed(slots);
    require_range("policy", policy, 0, 2);
    require_range("per_rank", per_rank, 0, INT32_MAX);
    require_range("threads", threads, 1, 1024);
    const std::size_t layers = arrays.load.extent(0);
    const Request request{rules_of(arrays, slots, nodes, survive),
                          static_cast<Policy>(policy),
                          aims_of(aims),
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
    const Answer answer{placement.data(), shares.data(), moves.data(), uneven.data()};
    {
        nb::gil_scoped_release unlocked;
        plan_layers(request, answer);
    }
    return nb::make_tuple(placement, shares, moves, uneven);
}

}  // namespace

void bind_plan(nb::module_& m) {
    m.def("plan", &py_plan, "load"_a, "windows"_a.none(), "slots"_a, "capacity"_a, "nodes"_a,
          "survive"_a, "installed"_a.none(), "policy"_a, "aims"_a, "allowance"_a, "per_rank"_a,
          "threads"_a,
          "Placement, shares, moves and imbalance (in 1 / 65536) of each layer; csrc/plan.h.");
}

}  // namespace equipoise
