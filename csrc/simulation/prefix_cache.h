// The prefix cache of a simulated worker: blocks of prompts whose KV it has kept. The least
// recently used are dropped first.
#pragma once

#include <cstdint>
#include <list>
#include <unordered_map>

#include "common/span.h"

namespace equipoise::requests {

class PrefixCache {
 public:
    explicit PrefixCache(std::int64_t blocks) : most_(blocks) {}

    // Returns how many of the first blocks are cached. A block without those before it is of no
    // use.
    std::int64_t match(Span<const std::int64_t> blocks) const {
        std::size_t n = 0;
        while (n < blocks.size && where_.count(blocks[n]) > 0) ++n;
        return static_cast<std::int64_t>(n);
    }

    // Marks blocks as used, the last one first: of a prompt the beginning then stays longest.
    void use(Span<const std::int64_t> blocks) {
        for (std::size_t i = blocks.size; i-- > 0;) {
            const auto found = where_.find(blocks[i]);
            if (found != where_.end()) {
                order_.splice(order_.begin(), order_, found->second);
                continue;
            }
            order_.push_front(blocks[i]);
            where_[blocks[i]] = order_.begin();
        }
        while (static_cast<std::int64_t>(order_.size()) > most_) {
            where_.erase(order_.back());
            order_.pop_back();
        }
    }

 private:
    std::int64_t most_;
    std::list<std::int64_t> order_;  // most recently used first
    std::unordered_map<std::int64_t, std::list<std::int64_t>::iterator> where_;
};

}  // namespace equipoise::requests
