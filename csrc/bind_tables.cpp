#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "checksum.h"
#include "table.h"

namespace equipoise {
namespace {

using namespace nb::literals;

// What tables are made of and where they go, of one layer (dims 1) or of several (dims 2).
struct Draft {
    std::size_t dims;
    std::int64_t experts;
    IdArray placement, shares;
    Output start, replicas, cumulative;

    std::size_t layers() const { return dims == 1 ? 1 : placement.extent(0); }

    // Raises ValueError unless everything has the shape that it has to have.
    void check() const {
        require_range("experts", experts, 1, INT32_MAX - 1);
        require_range("placement", placement.view(), 0, experts - 1);
        require_range("shares", shares.view(), 0, kShareOne);
        like("shares", shares, slots());
        like("start", start, static_cast<std::size_t>(experts) + 1);
        like("replicas", replicas, slots());
        like("cumulative", cumulative, slots());
        // What is written early is read again, as the cursors of a sort: it must stay as written.
        apart("start", start, "replicas", replicas);
        apart("start", start, "cumulative", cumulative);
        apart("replicas", replicas, "cumulative", cumulative);
        apart("start", start, "placement", placement);
        apart("start", start, "shares", shares);
        apart("replicas", replicas, "placement", placement);
        apart("replicas", replicas, "shares", shares);
        apart("cumulative", cumulative, "placement", placement);
        apart("cumulative", cumulative, "shares", shares);
    }

    void build(std::size_t layer, const std::string& where) const;

 private:
    std::size_t slots() const { return placement.extent(dims - 1); }

    template <typename T>
    void like(const char* name, const Array<T>& array, std::size_t width) const {
        const std::string rows = std::string(name) + " rows";
        if (dims == 2) require_size(rows.c_str(), array.extent(0), layers());
        require_size((name + std::string(dims == 2 ? " columns" : "")).c_str(),
                     array.extent(dims - 1), width);
    }

    template <typename T>
    static void apart(const char* name, const Output& written, const char* other,
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

void Draft::build(std::size_t layer, const std::string& where) const {
    const Ids places = row(placement, layer);
    const Span<std::int32_t> starts = row(start, layer), slots = row(replicas, layer);
    sort_slots(places, starts, slots);
    require_home(read(starts), where);
    require_whole(
        accumulate(row(shares, layer), read(starts), read(slots), row(cumulative, layer)), where);
}

Draft read_draft(std::size_t dims, nb::handle placement, nb::handle shares, std::int64_t experts,
                 nb::handle start, nb::handle replicas, nb::handle cumulative) {
    const Draft draft{dims,
                      experts,
                      IdArray("placement", placement, dims),
                      IdArray("shares", shares, dims),
                      Output("start", start, dims),
                      Output("replicas", replicas, dims),
                      Output("cumulative", cumulative, dims)};
    draft.check();
    return draft;
}

void py_build_table(nb::handle placement, nb::handle shares, std::int64_t experts,
                    nb::handle start, nb::handle replicas, nb::handle cumulative) {
    const Draft draft =
        read_draft(1, placement, shares, experts, start, replicas, cumulative);
    nb::gil_scoped_release unlocked;
    draft.build(0, "");
}

void py_build_tables(nb::handle placement, nb::handle shares, std::int64_t experts,
                     nb::handle start, nb::handle replicas, nb::handle cumulative) {
    const Draft draft =
        read_draft(2, placement, shares, experts, start, replicas, cumulative);
    nb::gil_scoped_release unlocked;
    for (std::size_t layer = 0; layer < draft.layers(); ++layer)
        draft.build(layer, " of row " + std::to_string(layer));
}

using Digests = nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>;

// Appends a row as bytes.
void append(std::vector<std::uint8_t>& bytes, Ids row) {
    const auto* data = reinterpret_cast<const std::uint8_t*>(row.data);
    bytes.insert(bytes.end(), data, data + row.size * sizeof(std::int32_t));
}

Digests py_digest_tables(nb::handle start, nb::handle replicas, nb::handle cumulative) {
    const IdArray parts[] = {{"start", start, 2}, {"replicas", replicas, 2},
                             {"cumulative", cumulative, 2}};
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

}  // namespace

void bind_tables(nb::module_& m) {
    m.def("build_table", &py_build_table, "placement"_a, "shares"_a, "experts"_a, "start"_a,
          "replicas"_a, "cumulative"_a,
          "Writes the routing table of one layer.");
    m.def("build_tables", &py_build_tables, "placement"_a, "shares"_a, "experts"_a, "start"_a,
          "replicas"_a, "cumulative"_a,
          "Writes the routing tables of several layers.");
    m.def("digest_tables", &py_digest_tables, "start"_a, "replicas"_a, "cumulative"_a,
          "A fingerprint of each layer's table.");
}

}  // namespace equipoise
