#include "bindings/numpy_arrays.h"

#include <nanobind/stl/string.h>

#include <algorithm>

namespace equipoise {
namespace {

// As many counts of at most kMaxTokens (46 bits) as can be summed in 64 bits without overflow.
constexpr std::size_t kSummed = std::size_t{1} << 16;

}  // namespace

void refuse(const char* name, const std::string& wanted, const std::string& got) {
    throw nb::value_error((std::string(name) + ": expected " + wanted + ", got " + got).c_str());
}

void require_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high)
        refuse(name, std::to_string(low) + " to " + std::to_string(high), std::to_string(value));
}

void require_range(const char* name, Ids values, std::int64_t low, std::int64_t high) {
    // Minimum and maximum first, which compilers vectorise; the loop that finds the offender runs
    // only if there is one.
    std::int32_t least = INT32_MAX, most = INT32_MIN;
    for (std::int32_t value : values) {
        least = std::min(least, value);
        most = std::max(most, value);
    }
    if (values.size == 0 || (least >= low && most <= high)) return;
    for (std::int32_t value : values) require_range(name, value, low, high);
}

void require_ranks(std::int64_t ranks, std::size_t slots) {
    if (ranks < 1 || slots % static_cast<std::size_t>(ranks) != 0)
        refuse("ranks", "a positive divisor of " + std::to_string(slots) + " slots",
               std::to_string(ranks));
}

void require_size(const char* name, std::size_t size, std::size_t wanted) {
    if (size != wanted) refuse(name, std::to_string(wanted) + " elements", std::to_string(size));
}

void require_counts(const char* name, Counts counts) {
    std::int64_t sum = 0, all = 0;
    for (std::int64_t count : counts) all |= count;
    // The fast way for what nearly always holds: the bits of all counts show that none is negative
    // and none is so large that the sum could overflow.
    if (all >= 0 && all <= kMaxTokens && counts.size <= kSummed) {
        for (std::int64_t count : counts) sum += count;
        if (sum <= kMaxTokens) return;
    }
    sum = 0;
    for (std::int64_t count : counts) {
        require_range(name, count, 0, kMaxTokens);
        sum += count;
        if (sum > kMaxTokens)
            refuse(name, "a sum per layer below 2^46", "at least " + std::to_string(sum));
    }
}

void require_every_expert_placed(Ids start, const std::string& where) {
    const std::int32_t expert = find_unplaced_expert(start);
    if (expert >= 0)
        refuse("placement", "a slot for every expert",
               "none for expert " + std::to_string(expert) + where);
}

void require_whole_shares(std::int32_t expert, const std::string& where) {
    if (expert >= 0)
        refuse("shares", "a sum of 65536 for every expert",
               "another for expert " + std::to_string(expert) + where);
}

void require_replica_runs(Ids start, Ids replicas) {
    if (start.size < 2) refuse("start", "at least 2 elements", std::to_string(start.size));
    const auto slots = static_cast<std::int32_t>(replicas.size);
    if (start[0] != 0 || start[start.size - 1] != slots)
        refuse("start", "0 first and the number of replicas last",
               std::to_string(start[0]) + " and " + std::to_string(start[start.size - 1]));
    for (std::size_t e = 0; e + 1 < start.size; ++e)
        if (start[e] >= start[e + 1])
            refuse("start", "a slot for every expert", "none for expert " + std::to_string(e));
    require_range("replicas", replicas, 0, slots - 1);
}

void require_routing_table(const RoutingTable& table) {
    require_replica_runs(table.start, table.replicas);
    require_size("cumulative", table.cumulative.size, table.replicas.size);
    for (std::int32_t e = 0; e < table.experts(); ++e) {
        std::int32_t low = 0;
        for (std::int32_t i = table.start[e]; i < table.start[e + 1]; ++i) {
            require_range("cumulative", table.cumulative[i], low, kShareOne);
            low = table.cumulative[i];
        }
        if (low != kShareOne)
            refuse("cumulative", "65536 at the end of every run",
                   std::to_string(low) + " for expert " + std::to_string(e));
    }
}

std::string describe(nb::dlpack::dtype type, std::size_t dims) {
    using Code = nb::dlpack::dtype_code;
    const char* kind = type.code == static_cast<std::uint8_t>(Code::Int)      ? "int"
                       : type.code == static_cast<std::uint8_t>(Code::UInt)   ? "uint"
                       : type.code == static_cast<std::uint8_t>(Code::Float)  ? "float"
                       : type.code == static_cast<std::uint8_t>(Code::Bool)   ? "bool"
                       : type.code == static_cast<std::uint8_t>(Code::Bfloat) ? "bfloat"
                                                                              : "unknown";
    return kind + std::to_string(type.bits) + " of " + std::to_string(dims) +
           (dims == 1 ? " dimension" : " dimensions");
}

TableArrays::TableArrays(nb::handle start, nb::handle replicas, nb::handle cumulative)
    : start_("start", start, 1),
      replicas_("replicas", replicas, 1),
      cumulative_("cumulative", cumulative, 1) {
    require_routing_table(table());
}

std::vector<std::int64_t> read_counts(const char* name, nb::handle source) {
    nb::ndarray<nb::ro> any;
    if (nb::try_cast(source, any) && any.dtype() == nb::dtype<std::int32_t>()) {
        const IdArray counts(name, source, 1);
        return {counts.view().begin(), counts.view().end()};
    }
    const CountArray counts(name, source, 1);
    return {counts.view().begin(), counts.view().end()};
}

Matrix make_matrix(std::size_t rows, std::size_t columns) {
    auto* data = new std::int32_t[rows * columns];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::int32_t*>(p); });
    return Matrix(data, {rows, columns}, owner);
}

}  // namespace equipoise
