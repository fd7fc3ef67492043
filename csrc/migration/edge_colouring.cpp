#include "migration/edge_colouring.h"

#include <algorithm>

namespace equipoise {
namespace {

constexpr std::int32_t kNone = -1;

// Returns the most messages that one rank sends or receives.
std::int32_t largest_degree(const std::vector<Message>& messages, std::int32_t ranks) {
    std::vector<std::int32_t> degree(2 * static_cast<std::size_t>(ranks));
    for (const Message& message : messages) {
        ++degree[message.source];
        ++degree[ranks + message.destination];
    }
    return degree.empty() ? 0 : *std::max_element(degree.begin(), degree.end());
}

// Which message each end has in each round. The ends are sender r and receiver ranks + r.
class RoundTable {
 public:
    RoundTable(std::vector<Message>& messages, std::int32_t ranks, std::int32_t rounds)
        : messages_(messages),
          ranks_(ranks),
          rounds_(rounds),
          words_((rounds + 63) / 64),
          message_at_(2 * static_cast<std::size_t>(ranks) * rounds, kNone),
          free_rounds_(2 * static_cast<std::size_t>(ranks) * words_, ~std::uint64_t{0}) {}

    void add(std::int32_t message) {
        const std::int32_t sender = messages_[message].source;
        const std::int32_t receiver = ranks_ + messages_[message].destination;
        std::int32_t round = first_free(sender, receiver);
        // No round is free at both ends. Each end has one of its own, as it has fewer messages than
        // there are rounds: swapping the two along a path frees the sender's round at the receiver.
        if (round >= rounds_) {
            round = first_free(sender, sender);
            swap_rounds_on_path(receiver, round, first_free(receiver, receiver));
        }
        assign(message, round);
    }

 private:
    // Returns the first round that is free at both ends. Bits beyond the last round are always set,
    // so the result is `rounds_` or more if there is none.
    std::int32_t first_free(std::int32_t one, std::int32_t other) const {
        const std::uint64_t* a = &free_rounds_[static_cast<std::size_t>(one) * words_];
        const std::uint64_t* b = &free_rounds_[static_cast<std::size_t>(other) * words_];
        for (std::int32_t w = 0; w < words_; ++w)
            if (const std::uint64_t both = a[w] & b[w]) return 64 * w + __builtin_ctzll(both);
        return rounds_;
    }

    // Swaps two rounds along the path that begins at the receiver `end` with `round`; `other` is
    // free there. The path cannot come to the sender for whom this is done: it enters senders by
    // `round`, which is free at that one.
    void swap_rounds_on_path(std::int32_t end, std::int32_t round, std::int32_t other) {
        path_.clear();
        for (std::int32_t message; (message = message_at(end, round)) != kNone;
             std::swap(round, other)) {
            path_.push_back(message);
            end =
                end < ranks_ ? ranks_ + messages_[message].destination : messages_[message].source;
        }
        const std::int32_t sum = round + other;
        // All are taken out before any is put back: neighbours on the path share an end, and would
        // overwrite each other.
        for (std::int32_t message : path_) unassign(message);
        for (std::int32_t message : path_) assign(message, sum - messages_[message].round);
    }

    void assign(std::int32_t message, std::int32_t round) {
        messages_[message].round = round;
        set_message(messages_[message].source, round, message);
        set_message(ranks_ + messages_[message].destination, round, message);
    }

    void unassign(std::int32_t message) {
        set_message(messages_[message].source, messages_[message].round, kNone);
        set_message(ranks_ + messages_[message].destination, messages_[message].round, kNone);
    }

    std::int32_t& message_at(std::int32_t end, std::int32_t round) {
        return message_at_[static_cast<std::size_t>(end) * rounds_ + round];
    }

    void set_message(std::int32_t end, std::int32_t round, std::int32_t message) {
        message_at(end, round) = message;
        std::uint64_t& word = free_rounds_[static_cast<std::size_t>(end) * words_ + round / 64];
        const std::uint64_t bit = std::uint64_t{1} << (round % 64);
        word = message == kNone ? word | bit : word & ~bit;
    }

    std::vector<Message>& messages_;
    std::int32_t ranks_, rounds_, words_;
    std::vector<std::int32_t> message_at_;
    std::vector<std::uint64_t> free_rounds_;  // by end, one bit per round: 64 are checked at once
    std::vector<std::int32_t> path_;
};

}  // namespace

std::int32_t assign_rounds(std::vector<Message>& messages, std::int32_t ranks) {
    const std::int32_t rounds = largest_degree(messages, ranks);
    RoundTable table(messages, ranks, rounds);
    for (std::size_t i = 0; i < messages.size(); ++i) table.add(static_cast<std::int32_t>(i));
    return rounds;
}

}  // namespace equipoise
