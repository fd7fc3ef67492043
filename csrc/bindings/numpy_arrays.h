// Arrays from Python. They are checked here, once, before the interpreter lock is released: the
// code behind the bindings relies on shapes and values. Each error is one line with the name, what
// was expected and what came.
#pragma once

#include <nanobind/ndarray.h>

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/span.h"
#include "routing/routing_table.h"

namespace equipoise {

namespace nb = nanobind;

// Throws nb::value_error "NAME: expected WANTED, got GOT", which is a ValueError in Python.
[[noreturn]] void refuse(const char* name, const std::string& wanted, const std::string& got);

// Each `require_` function below throws as `refuse` does if its condition does not hold.
// low <= value <= high.
void require_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high);
void require_range(const char* name, Ids values, std::int64_t low, std::int64_t high);

// `ranks` is positive and divides `slots`.
void require_ranks(std::int64_t ranks, std::size_t slots);

void require_size(const char* name, std::size_t size, std::size_t wanted);

// No count is negative, and their sum is at most kMaxTokens.
void require_counts(const char* name, Counts counts);

// Every expert has a slot; `where` ends the message.
void require_every_expert_placed(Ids start, const std::string& where);

// `expert`, the first whose shares do not sum to one, is -1.
void require_whole_shares(std::int32_t expert, const std::string& where);

// `start` and `replicas` describe a run of slots for every expert.
void require_replica_runs(Ids start, Ids replicas);

// As require_replica_runs, and the cumulative shares of each run rise to exactly one.
void require_routing_table(const RoutingTable& table);

// "int32 of 2 dimensions", for messages.
std::string describe(nb::dlpack::dtype type, std::size_t dims);

// A C-contiguous array of `dims` dimensions in host memory, kept alive by this object. T is const
// if the array is only read; otherwise the array has to be writable.
template <typename T>
class Array {
 public:
    Array(const char* name, nb::handle source, std::size_t dims) {
        const std::string wanted = describe(nb::dtype<std::remove_const_t<T>>(), dims) +
                                   ", C-contiguous, on the host" +
                                   (std::is_const_v<T> ? "" : ", writable");
        // Cast without conditions on type and shape: those are checked below, with messages of our
        // own.
        if (!nb::try_cast(source, array_))
            refuse(name, wanted, nb::type_name(source.type()).c_str());
        const bool same = array_.dtype() == nb::dtype<std::remove_const_t<T>>();
        if (!same || array_.ndim() != dims)
            refuse(name, wanted, describe(array_.dtype(), array_.ndim()));
        if (array_.device_type() != nb::device::cpu::value)
            refuse(name, wanted, "an array in device memory");
        if (!contiguous()) refuse(name, wanted, "a strided array");
        data_ = static_cast<T*>(array_.data());
    }

    // Whether the two have a byte of memory in common. std::less, because < is not defined for
    // pointers to different arrays.
    template <typename U>
    bool overlaps(const Array<U>& other) const {
        const auto *begin = reinterpret_cast<const char*>(view().begin()),
                   *end = reinterpret_cast<const char*>(view().end());
        const auto *first = reinterpret_cast<const char*>(other.view().begin()),
                   *last = reinterpret_cast<const char*>(other.view().end());
        return std::less<>{}(begin, last) && std::less<>{}(first, end) && size() > 0 &&
               other.size() > 0;
    }

    std::size_t extent(std::size_t dim) const { return array_.shape(dim); }
    std::size_t size() const { return array_.size(); }
    Span<T> span() const { return {data_, size()}; }
    Span<const T> view() const { return {data_, size()}; }
    Span<const T> row(std::size_t i) const { return {data_ + i * extent(1), extent(1)}; }

 private:
    using Access = std::conditional_t<std::is_const_v<T>, nb::ndarray<nb::ro>, nb::ndarray<>>;

    // Strides of dimensions of one element do not count, nor do any of an empty array.
    bool contiguous() const {
        std::int64_t step = 1;
        for (std::size_t d = array_.ndim(); d-- > 0;) {
            if (array_.shape(d) > 1 && array_.stride(d) != step) return size() == 0;
            step *= static_cast<std::int64_t>(array_.shape(d));
        }
        return true;
    }

    Access array_;
    T* data_ = nullptr;
};

using IdArray = Array<const std::int32_t>;
using CountArray = Array<const std::int64_t>;
using Output = Array<std::int32_t>;

// The three arrays of a routing table, checked with each other.
class TableArrays {
 public:
    TableArrays(nb::handle start, nb::handle replicas, nb::handle cumulative);
    RoutingTable table() const { return {start_.view(), replicas_.view(), cumulative_.view()}; }

 private:
    IdArray start_, replicas_, cumulative_;
};

// Reads counts of int32 or int64. Copies them, because the solver needs 64 bits.
std::vector<std::int64_t> read_counts(const char* name, nb::handle source);

// A new int32 [rows, columns] array of numpy, not initialised.
using Matrix = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<2>>;
Matrix make_matrix(std::size_t rows, std::size_t columns);

}  // namespace equipoise
