#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "lists.h"
#include "table.h"

namespace equipoise {
namespace {

using namespace nb::literals;

Span<std::int32_t> span(std::vector<std::int32_t>& values) {
    return {values.data(), values.size()};
}
Ids view(const std::vector<std::int32_t>& values) { return {values.data(), values.size()}; }

// The runs of one layer after the other.
struct Runs {
    std::vector<std::int32_t> start, slots, sums;

    Runs(std::size_t experts, std::size_t width)
        : start(experts + 1), slots(width), sums(width) {}

    // Raises ValueError unless every expert has a slot, and its shares sum to one.
    void read(Ids placement, Ids shares, const std::string& where) {
        sort_slots(placement, span(start), span(slots));
        require_home(view(start), where);
        require_whole(accumulate(shares, view(start), view(slots), span(sums)), where);
    }
};

void py_fill_lists(nb::handle placement, nb::handle shares, nb::handle order, nb::handle lists) {
    const IdArray places("placement", placement, 2), parts("shares", shares, 2);
    const IdArray entries("order", order, 1);
    const Output out("lists", lists, 3);
    const std::size_t layers = places.extent(0), slots = places.extent(1);
    require_size("shares rows", parts.extent(0), layers);
    require_size("shares columns", parts.extent(1), slots);
    require_size("lists", out.extent(0), layers);
    require_size("lists of a layer", out.extent(2), entries.size());
    if (!is_order(entries.view())) refuse("order", "every place once", "another order");
    const std::size_t experts = out.extent(1);
    require_range("placement", places.view(), 0, static_cast<std::int64_t>(experts) - 1);
    require_range("shares", parts.view(), 0, kShareOne);
    nb::gil_scoped_release unlocked;
    Runs runs(experts, slots);
    for (std::size_t layer = 0; layer < layers; ++layer) {
        runs.read(places.row(layer), parts.row(layer), " of row " + std::to_string(layer));
        const std::size_t size = experts * entries.size();
        fill_lists(view(runs.start), view(runs.slots), parts.row(layer), entries.view(),
                   {out.span().data + layer * size, size});
    }
}

}  // namespace

void bind_lists(nb::module_& m) {
    m.def("fill_lists", &py_fill_lists, "placement"_a, "shares"_a, "order"_a, "lists"_a,
          "Shares as lists of replicas; csrc/lists.h has the rule.");
}

}  // namespace equipoise
