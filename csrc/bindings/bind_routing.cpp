#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/numpy_arrays.h"
#include "common/checksum.h"
#include "common/hash.h"
#include "routing/deal_rows.h"
#include "routing/levelled_route.h"
#include "routing/route.h"
#include "routing/routing_rules.h"
#include "routing/routing_table.h"

namespace equipoise {
namespace {

using namespace nb::literals;

// Arguments of build_table (dims 1) and build_tables (dims 2): what tables are made of, and where
// they are written.
struct TableArguments {
    std::size_t dims;
    std::int64_t experts;
    IdArray placement, shares;
    Output start, replicas, cumulative;

    std::size_t layers() const { return dims == 1 ? 1 : placement.extent(0); }

    // Throws unless all arrays have the shapes and values that `build` relies on.
    void check() const {
        require_range("experts", experts, 1, INT32_MAX - 1);
        require_range("placement", placement.view(), 0, experts - 1);
        require_range("shares", shares.view(), 0, kShareOne);
        require_width("shares", shares, slots());
        require_width("start", start, static_cast<std::size_t>(experts) + 1);
        require_width("replicas", replicas, slots());
        require_width("cumulative", cumulative, slots());
        // Outputs must not share memory with each other or with inputs: `build` reads what it wrote
        // before, and uses it as indices.
        require_apart("start", start, "replicas", replicas);
        require_apart("start", start, "cumulative", cumulative);
        require_apart("replicas", replicas, "cumulative", cumulative);
        require_apart("start", start, "placement", placement);
        require_apart("start", start, "shares", shares);
        require_apart("replicas", replicas, "placement", placement);
        require_apart("replicas", replicas, "shares", shares);
        require_apart("cumulative", cumulative, "placement", placement);
        require_apart("cumulative", cumulative, "shares", shares);
    }

    void build(std::size_t layer, const std::string& where) const;

 private:
    std::size_t slots() const { return placement.extent(dims - 1); }

    template <typename T>
    void require_width(const char* name, const Array<T>& array, std::size_t width) const {
        const std::string rows = std::string(name) + " rows";
        if (dims == 2) require_size(rows.c_str(), array.extent(0), layers());
        require_size((name + std::string(dims == 2 ? " columns" : "")).c_str(),
                     array.extent(dims - 1), width);
    }

    template <typename T>
    static void require_apart(const char* name, const Output& written, const char* other,
                              const Array<T>& array) {
        if (written.overlaps(array))
            refuse(name, "memory of its own", std::string("memory of ") + other);
    }

    template <typename T>
    Span<T> row(const Array<T>& array, std::size_t layer) const {
        const std::size_t width = array.extent(dims - 1);
        return {array.span().data + layer * width, width};
    }
};

Ids read(Span<std::int32_t> span) { return {span.data, span.size}; }

void TableArguments::build(std::size_t layer, const std::string& where) const {
    const Ids places = row(placement, layer);
    const Span<std::int32_t> starts = row(start, layer), slots = row(replicas, layer);
    sort_slots(places, starts, slots);
    require_every_expert_placed(read(starts), where);
    require_whole_shares(
        accumulate_shares(row(shares, layer), read(starts), read(slots), row(cumulative, layer)),
        where);
}

TableArguments read_table_arguments(std::size_t dims, nb::handle placement, nb::handle shares,
                                    std::int64_t experts, nb::handle start, nb::handle replicas,
                                    nb::handle cumulative) {
    const TableArguments table{dims,
                               experts,
                               IdArray("placement", placement, dims),
                               IdArray("shares", shares, dims),
                               Output("start", start, dims),
                               Output("replicas", replicas, dims),
                               Output("cumulative", cumulative, dims)};
    table.check();
    return table;
}

void py_build_table(nb::handle placement, nb::handle shares, std::int64_t experts, nb::handle start,
                    nb::handle replicas, nb::handle cumulative) {
    const TableArguments table =
        read_table_arguments(1, placement, shares, experts, start, replicas, cumulative);
    nb::gil_scoped_release unlocked;
    table.build(0, "");
}

void py_build_tables(nb::handle placement, nb::handle shares, std::int64_t experts,
                     nb::handle start, nb::handle replicas, nb::handle cumulative) {
    const TableArguments table =
        read_table_arguments(2, placement, shares, experts, start, replicas, cumulative);
    nb::gil_scoped_release unlocked;
    for (std::size_t layer = 0; layer < table.layers(); ++layer)
        table.build(layer, " of row " + std::to_string(layer));
}

using Digests = nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>;

// Appends the bytes of a row.
void append(std::vector<std::uint8_t>& bytes, Ids row) {
    const auto* data = reinterpret_cast<const std::uint8_t*>(row.data);
    bytes.insert(bytes.end(), data, data + row.size * sizeof(std::int32_t));
}

Digests py_digest_tables(nb::handle start, nb::handle replicas, nb::handle cumulative) {
    const IdArray parts[] = {
        {"start", start, 2}, {"replicas", replicas, 2}, {"cumulative", cumulative, 2}};
    const std::size_t layers = parts[0].extent(0);
    require_size("replicas rows", parts[1].extent(0), layers);
    require_size("cumulative rows", parts[2].extent(0), layers);
    auto* digests = new std::uint64_t[layers];
    nb::capsule owner(digests, [](void* p) noexcept { delete[] static_cast<std::uint64_t*>(p); });
    {
        nb::gil_scoped_release unlocked;
        std::vector<std::uint8_t> bytes;
        for (std::size_t layer = 0; layer < layers; ++layer) {
            bytes.clear();
            for (const IdArray& part : parts) append(bytes, part.row(layer));
            digests[layer] = checksum({bytes.data(), bytes.size()});
        }
    }
    return Digests(digests, {layers}, owner);
}

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

// Arguments of route_hashed and route_apportioned, checked.
struct RouteArguments {
    IdArray ids;
    TableArrays arrays;
    Output slots, counts;

    RouteArguments(nb::handle ids, nb::handle start, nb::handle replicas, nb::handle cumulative,
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
    const RouteArguments batch(ids, start, replicas, cumulative, slots, counts);
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
    const RouteArguments batch(ids, start, replicas, cumulative, slots, counts);
    require_salt(rank, layer, 0);
    const std::uint32_t seed =
        seed32(static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(layer), 0);
    nb::gil_scoped_release unlocked;
    route_apportioned(batch.ids.view(), batch.arrays.table(), seed, batch.slots.span(),
                      batch.counts.span());
}

// Arguments of a pass that reads no shares, checked.
struct ShareFreeArguments {
    IdArray ids, start, replicas;
    Output slots, counts;

    ShareFreeArguments(nb::handle ids, nb::handle start, nb::handle replicas, nb::handle slots,
                       nb::handle counts)
        : ids("ids", ids, 1),
          start("start", start, 1),
          replicas("replicas", replicas, 1),
          slots("slots", slots, 1),
          counts("counts", counts, 1) {
        const auto elements = static_cast<std::int64_t>(this->ids.size());
        require_range("ids elements", elements, 0, INT32_MAX);
        require_replica_runs(this->start.view(), this->replicas.view());
        require_size("slots", this->slots.size(), this->ids.size());
        require_size("counts", this->counts.size(), this->start.size() - 1);
    }
};

void py_route_by_row_hash(nb::handle ids, nb::handle start, nb::handle replicas, std::int64_t top_k,
                          std::int64_t rows, nb::handle slots, nb::handle counts) {
    const ShareFreeArguments batch(ids, start, replicas, slots, counts);
    require_range("top_k", top_k, 1, INT32_MAX);
    nb::gil_scoped_release unlocked;
    route_by_row_hash(batch.ids.view(), batch.start.view(), batch.replicas.view(), top_k, rows,
                      batch.slots.span(), batch.counts.span());
}

void py_route_by_block_turns(nb::handle ids, nb::handle start, nb::handle replicas,
                             std::int64_t offset, nb::handle slots, nb::handle counts) {
    const ShareFreeArguments batch(ids, start, replicas, slots, counts);
    require_range("offset", offset, 0, INT32_MAX);
    nb::gil_scoped_release unlocked;
    route_by_block_turns(batch.ids.view(), batch.start.view(), batch.replicas.view(), offset,
                         batch.slots.span(), batch.counts.span());
}

// Counts of a group, checked: both or neither.
class GroupArguments {
 public:
    GroupArguments(nb::handle total, nb::handle before, const Output& counts) {
        if (total.is_none() != before.is_none())
            refuse("before", "counts where total has them, else None", "only one of them");
        if (total.is_none()) return;
        check(total_.emplace("total", total, 1), counts);
        check(before_.emplace("before", before, 1), counts);
    }

    GroupCounts counts() const {
        if (!total_) return {{nullptr, 0}, {nullptr, 0}};
        return {total_->view(), before_->view()};
    }

 private:
    static void check(const IdArray& summed, const Output& counts) {
        require_size("counts of a group", summed.size(), counts.size());
        require_range("counts of a group", summed.view(), 0, INT32_MAX);
        // The batch is counted first.
        if (counts.overlaps(summed)) refuse("counts", "memory of its own", "memory of a group");
    }

    std::optional<IdArray> total_, before_;
};

void py_route_levelled(nb::handle ids, nb::handle start, nb::handle replicas, std::int64_t ranks,
                       std::int64_t rank, std::int64_t layer, nb::handle slots, nb::handle counts,
                       nb::handle total, nb::handle before) {
    const ShareFreeArguments batch(ids, start, replicas, slots, counts);
    const GroupArguments group(total, before, batch.counts);
    require_ranks(ranks, batch.replicas.size());
    require_salt(rank, layer, 0);
    const std::uint32_t seed =
        seed32(static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(layer), 0);
    nb::gil_scoped_release unlocked;
    const RoutingTable table{batch.start.view(), batch.replicas.view(), {nullptr, 0}};
    route_levelled(batch.ids.view(), table, static_cast<std::int32_t>(ranks), seed, group.counts(),
                   batch.slots.span(), batch.counts.span());
}

// Counts of several batches, and the table by which they are divided, checked.
struct CountedBatches {
    IdArray counts, start, replicas;
    std::int32_t ranks;

    CountedBatches(nb::handle counts, nb::handle start, nb::handle replicas, std::int64_t ranks)
        : counts("counts", counts, 2),
          start("start", start, 1),
          replicas("replicas", replicas, 1),
          ranks(static_cast<std::int32_t>(ranks)) {
        require_replica_runs(this->start.view(), this->replicas.view());
        require_ranks(ranks, this->replicas.size());
        require_size("counts columns", this->counts.extent(1), this->start.size() - 1);
        require_range("counts", this->counts.view(), 0, INT32_MAX);
    }

    RoutingTable table() const { return {start.view(), replicas.view(), {nullptr, 0}}; }
};

void py_levelled_rows(nb::handle counts, nb::handle start, nb::handle replicas,
                      std::int64_t ranks, std::int64_t layer, bool groups, nb::handle rows) {
    const CountedBatches batches(counts, start, replicas, ranks);
    const Array<std::int64_t> sums("rows", rows, 1);
    require_size("rows", sums.size(), batches.replicas.size());
    const std::size_t number = batches.counts.extent(0);
    require_salt(static_cast<std::int64_t>(number), layer, 0);
    nb::gil_scoped_release unlocked;
    std::fill(sums.span().begin(), sums.span().end(), 0);
    for (std::size_t batch = 0; batch < number; ++batch) {
        const std::uint32_t seed =
            seed32(static_cast<std::uint32_t>(batch), static_cast<std::uint32_t>(layer), 0);
        add_levelled_rows(batches.counts.row(batch), batches.table(), batches.ranks, seed, groups,
                          sums.span());
    }
}

void py_levelled_group_rows(nb::handle counts, nb::handle start, nb::handle replicas,
                            std::int64_t ranks, std::int64_t group, std::int64_t layer,
                            nb::handle rows) {
    const CountedBatches members(counts, start, replicas, ranks);
    const Array<std::int64_t> divided("rows", rows, 2);
    const Ids all = members.counts.view();
    const std::int64_t total = std::accumulate(all.begin(), all.end(), std::int64_t{0});
    require_range("sum of counts", total, 0, INT32_MAX);
    require_size("rows rows", divided.extent(0), members.counts.extent(0));
    require_size("rows columns", divided.extent(1), members.replicas.size());
    require_salt(group, layer, 0);
    const std::uint32_t seed =
        seed32(static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(layer), 0);
    nb::gil_scoped_release unlocked;
    divide_group_rows(all, members.table(), members.ranks, seed, divided.span());
}

// Layers follow each other in one sequence of draws.
void py_deal_rows(nb::handle counts, std::int64_t ranks, std::int64_t seed, nb::handle dealt) {
    const IdArray layers("counts", counts, 2);
    const Output rows("dealt", dealt, 3);
    require_range("ranks", ranks, 1, 1 << 16);
    require_range("seed", seed, 0, INT64_MAX);
    require_range("counts", layers.view(), 0, INT32_MAX);
    require_size("dealt layers", rows.extent(0), layers.extent(0));
    require_size("dealt ranks", rows.extent(1), static_cast<std::size_t>(ranks));
    require_size("dealt experts", rows.extent(2), layers.extent(1));
    nb::gil_scoped_release unlocked;
    const std::size_t experts = layers.extent(1), width = experts * rows.extent(1);
    for (std::size_t layer = 0; layer < layers.extent(0); ++layer)
        deal_rows({layers.view().data + layer * experts, experts},
                  static_cast<std::int32_t>(ranks),
                  mix64(static_cast<std::uint64_t>(seed) + kStep64) + layer,
                  {rows.span().data + layer * width, width});
}

}  // namespace

void bind_routing(nb::module_& m) {
    m.def("build_table", &py_build_table, "placement"_a, "shares"_a, "experts"_a, "start"_a,
          "replicas"_a, "cumulative"_a, "Writes the routing table of one layer.");
    m.def("build_tables", &py_build_tables, "placement"_a, "shares"_a, "experts"_a, "start"_a,
          "replicas"_a, "cumulative"_a, "Writes the routing tables of several layers.");
    m.def("digest_tables", &py_digest_tables, "start"_a, "replicas"_a, "cumulative"_a,
          "A digest of each layer's table.");
    m.def("count_experts", &py_count_experts, "ids"_a, "counts"_a,
          "Writes how often each expert occurs; ids outside the range are ignored.");
    m.def("route_hashed", &py_route_hashed, "ids"_a, "start"_a, "replicas"_a, "cumulative"_a,
          "rank"_a, "layer"_a, "step"_a, "slots"_a, "counts"_a,
          "Slots by the draw of each element's place; semantics in hal/routing.py.");
    m.def("route_apportioned", &py_route_apportioned, "ids"_a, "start"_a, "replicas"_a,
          "cumulative"_a, "rank"_a, "layer"_a, "slots"_a, "counts"_a,
          "Slots by whole quotas of this batch's own counts; semantics in hal/routing.py.");
    m.def("route_by_row_hash", &py_route_by_row_hash, "ids"_a, "start"_a, "replicas"_a, "top_k"_a,
          "rows"_a, "slots"_a, "counts"_a,
          "Slots by vLLM's rule; semantics in hal/routing_rules.py.");
    m.def("route_by_block_turns", &py_route_by_block_turns, "ids"_a, "start"_a, "replicas"_a,
          "offset"_a, "slots"_a, "counts"_a,
          "Slots by TensorRT-LLM's rule; semantics in hal/routing_rules.py.");
    m.def("route_levelled", &py_route_levelled, "ids"_a, "start"_a, "replicas"_a, "ranks"_a,
          "rank"_a, "layer"_a, "slots"_a, "counts"_a, "total"_a.none() = nb::none(),
          "before"_a.none() = nb::none(),
          "Slots that level the batch over the ranks; semantics in hal/levelled_routing.py.");
    m.def("deal_rows", &py_deal_rows, "counts"_a, "ranks"_a, "seed"_a, "dealt"_a,
          "Writes how many rows of each expert come from each rank, at random.");
    m.def("levelled_rows", &py_levelled_rows, "counts"_a, "start"_a, "replicas"_a, "ranks"_a,
          "layer"_a, "groups"_a, "rows"_a, "Writes rows by slot of batches that are levelled, from their counts.");
    m.def("levelled_group_rows", &py_levelled_group_rows, "counts"_a, "start"_a, "replicas"_a,
          "ranks"_a, "group"_a, "layer"_a, "rows"_a,
          "Writes rows by member and slot of a group that is levelled, from its counts.");
}

}  // namespace equipoise
