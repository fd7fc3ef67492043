#include "migration/edge_colouring.h"

#include <algorithm>

namespace equipoise {
namespace {

constexpr std::int32_t kNobody = -1;

// The largest number of blobs that a rank sends, or receives.
std::int32_t largest_degree(const std::vector<Blob>& blobs, std::int32_t ranks) {
    std::vector<std::int32_t> degree(2 * static_cast<std::size_t>(ranks));
    for (const Blob& blob : blobs) {
        ++degree[blob.source];
        ++degree[ranks + blob.destination];
    }
    return degree.empty() ? 0 : *std::max_element(degree.begin(), degree.end());
}

// Which blob each end, sender r or receiver ranks + r, has in each round.
class Timetable {
 public:
    Timetable(std::vector<Blob>& blobs, std::int32_t ranks, std::int32_t rounds)
        : blobs_(blobs),
          ranks_(ranks),
          rounds_(rounds),
          words_((rounds + 63) / 64),
          at_(2 * static_cast<std::size_t>(ranks) * rounds, kNobody),
          free_(2 * static_cast<std::size_t>(ranks) * words_, ~std::uint64_t{0}) {}

    void add(std::int32_t blob) {
        const std::int32_t sender = blobs_[blob].source;
        const std::int32_t receiver = ranks_ + blobs_[blob].destination;
        std::int32_t round = first_free(sender, receiver);
        if (round >= rounds_) {
            round = first_free(sender, sender);
            exchange(receiver, round, first_free(receiver, receiver));
        }
        put(blob, round);
    }

 private:
    // The first round that is free at both ends; bits beyond the last round are always set.
    std::int32_t first_free(std::int32_t one, std::int32_t other) const {
        const std::uint64_t* a = &free_[static_cast<std::size_t>(one) * words_];
        const std::uint64_t* b = &free_[static_cast<std::size_t>(other) * words_];
        for (std::int32_t w = 0; w < words_; ++w)
            if (const std::uint64_t both = a[w] & b[w]) return 64 * w + __builtin_ctzll(both);
        return rounds_;
    }

    // Exchanges two rounds along the path that begins at `end` with `round`, where `other` is free.
    // It cannot come to the sender for whom this is done: it enters senders by `round`, which is
    // free there.
    void exchange(std::int32_t end, std::int32_t round, std::int32_t other) {
        path_.clear();
        for (std::int32_t blob; (blob = at(end, round)) != kNobody; std::swap(round, other)) {
            path_.push_back(blob);
            end = end < ranks_ ? ranks_ + blobs_[blob].destination : blobs_[blob].source;
        }
        const std::int32_t sum = round + other;
        for (std::int32_t blob : path_) take(blob);
        for (std::int32_t blob : path_) put(blob, sum - blobs_[blob].round);
    }

    void put(std::int32_t blob, std::int32_t round) {
        blobs_[blob].round = round;
        mark(blobs_[blob].source, round, blob);
        mark(ranks_ + blobs_[blob].destination, round, blob);
    }

    void take(std::int32_t blob) {
        mark(blobs_[blob].source, blobs_[blob].round, kNobody);
        mark(ranks_ + blobs_[blob].destination, blobs_[blob].round, kNobody);
    }

    std::int32_t& at(std::int32_t end, std::int32_t round) {
        return at_[static_cast<std::size_t>(end) * rounds_ + round];
    }

    void mark(std::int32_t end, std::int32_t round, std::int32_t blob) {
        at(end, round) = blob;
        std::uint64_t& word = free_[static_cast<std::size_t>(end) * words_ + round / 64];
        const std::uint64_t bit = std::uint64_t{1} << (round % 64);
        word = blob == kNobody ? word | bit : word & ~bit;
    }

    std::vector<Blob>& blobs_;
    std::int32_t ranks_, rounds_, words_;
    std::vector<std::int32_t> at_;
    std::vector<std::uint64_t> free_;
    std::vector<std::int32_t> path_;
};

}  // namespace

std::int32_t assign_rounds(std::vector<Blob>& blobs, std::int32_t ranks) {
    const std::int32_t rounds = largest_degree(blobs, ranks);
    Timetable timetable(blobs, ranks, rounds);
    for (std::size_t i = 0; i < blobs.size(); ++i) timetable.add(static_cast<std::int32_t>(i));
    return rounds;
}

}  // namespace equipoise
