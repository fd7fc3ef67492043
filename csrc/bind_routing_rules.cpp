#include "arrays.h"
#include "bindings.h"
#include "routing_rules.h"

namespace equipoise {
namespace {

using namespace nb::literals;

// One call of either rule, its arrays checked.
struct Batch {
    IdArray ids, start, replicas;
    Output slots, counts;

    Batch(nb::handle ids, nb::handle start, nb::handle replicas, nb::handle slots,
          nb::handle counts)
        : ids("ids", ids, 1),
          start("start", start, 1),
          replicas("replicas", replicas, 1),
          slots("slots", slots, 1),
          counts("counts", counts, 1) {
        const auto elements = static_cast<std::int64_t>(this->ids.size());
        require_range("ids elements", elements, 0, INT32_MAX);
        require_runs(this->start.view(), this->replicas.view());
        require_size("slots", this->slots.size(), this->ids.size());
        require_size("counts", this->counts.size(), this->start.size() - 1);
    }
};

void py_route_by_row_hash(nb::handle ids, nb::handle start, nb::handle replicas, std::int64_t top_k,
                   std::int64_t rows, nb::handle slots, nb::handle counts) {
    const Batch batch(ids, start, replicas, slots, counts);
    require_range("top_k", top_k, 1, INT32_MAX);
    nb::gil_scoped_release unlocked;
    route_by_row_hash(batch.ids.view(), batch.start.view(), batch.replicas.view(), top_k, rows,
               batch.slots.span(), batch.counts.span());
}

void py_route_by_block_turns(nb::handle ids, nb::handle start, nb::handle replicas,
                           std::int64_t offset, nb::handle slots, nb::handle counts) {
    const Batch batch(ids, start, replicas, slots, counts);
    require_range("offset", offset, 0, INT32_MAX);
    nb::gil_scoped_release unlocked;
    route_by_block_turns(batch.ids.view(), batch.start.view(), batch.replicas.view(), offset,
                       batch.slots.span(), batch.counts.span());
}

}  // namespace

void bind_routing_rules(nb::module_& m) {
    m.def("route_by_row_hash", &py_route_by_row_hash, "ids"_a, "start"_a, "replicas"_a, "top_k"_a,
          "rows"_a, "slots"_a, "counts"_a,
          "Slots by vLLM's rule; semantics in hal/routing_rules.py.");
    m.def("route_by_block_turns", &py_route_by_block_turns, "ids"_a, "start"_a, "replicas"_a,
          "offset"_a, "slots"_a, "counts"_a,
          "Slots by TensorRT-LLM's rule; semantics in hal/routing_rules.py.");
}

}  // namespace equipoise
