#include "arrays.h"
#include "bindings.h"
#include "mix.h"
#include "routing.h"

namespace equipoise {
namespace {

using namespace nb::literals;

void require_batch(const IdArray& ids) {
    require_range("ids elements", static_cast<std::int64_t>(ids.size()), 0, INT32_MAX);
}

void py_count_experts(nb::handle ids, nb::handle counts) {
    const IdArray experts("ids", ids, 1);
    const Output out("counts", counts, 1);
    require_batch(experts);
    nb::gil_scoped_release unlocked;
    count_experts(experts.view(), out.span());
}

// One call of either routing, its arrays checked.
struct Batch {
    IdArray ids;
    TableArrays arrays;
    Output slots, counts;

    Batch(nb::handle ids, nb::handle start, nb::handle replicas, nb::handle cumulative,
          nb::handle slots, nb::handle counts)
        : ids("ids", ids, 1),
          arrays(start, replicas, cumulative),
          slots("slots", slots, 1),
          counts("counts", counts, 1) {
        require_batch(this->ids);
        require_size("slots", this->slots.size(), this->ids.size());
        require_size("counts", this->counts.size(),
                     static_cast<std::size_t>(arrays.table().experts()));
    }
};

void require_salt(std::int64_t rank, std::int64_t layer, std::int64_t step) {
    require_range("rank", rank, 0, INT32_MAX);
    require_range("layer", layer, 0, INT32_MAX);
    require_range("step", step, 0, INT64_MAX);
}

void py_route_hashed(nb::handle ids, nb::handle start, nb::handle replicas, nb::handle cumulative,
                     std::int64_t rank, std::int64_t layer, std::int64_t step, nb::handle slots,
                     nb::handle counts) {
    const Batch batch(ids, start, replicas, cumulative, slots, counts);
    require_salt(rank, layer, step);
    const std::uint32_t begin =
        window_begin(static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(layer),
                     static_cast<std::uint32_t>(step));
    nb::gil_scoped_release unlocked;
    route_hashed(batch.ids.view(), batch.arrays.table(), begin, batch.slots.span(),
                 batch.counts.span());
}

void py_route_apportioned(nb::handle ids, nb::handle start, nb::handle replicas,
                          nb::handle cumulative, std::int64_t rank, std::int64_t layer,
                          nb::handle slots, nb::handle counts) {
    const Batch batch(ids, start, replicas, cumulative, slots, counts);
    require_salt(rank, layer, 0);
    const std::uint32_t seed =
        seed32(static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(layer), 0);
    nb::gil_scoped_release unlocked;
    route_apportioned(batch.ids.view(), batch.arrays.table(), seed, batch.slots.span(),
                      batch.counts.span());
}

}  // namespace

void bind_routing(nb::module_& m) {
    m.def("count_experts", &py_count_experts, "ids"_a, "counts"_a,
          "Writes how often each expert occurs; ids outside the range are ignored.");
    m.def("route_hashed", &py_route_hashed, "ids"_a, "start"_a, "replicas"_a, "cumulative"_a,
          "rank"_a, "layer"_a, "step"_a, "slots"_a, "counts"_a,
          "Slots by the draw of each element's place; semantics in hal/routing.py.");
    m.def("route_apportioned", &py_route_apportioned, "ids"_a, "start"_a, "replicas"_a,
          "cumulative"_a, "rank"_a, "layer"_a, "slots"_a, "counts"_a,
          "Slots by whole quotas of this batch's own counts; semantics in hal/routing.py.");
}

}  // namespace equipoise
