// One worker of the simulation, as it really is: its queue, its slots, its KV cache.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <queue>
#include <utility>

#include "common/random.h"
#include "simulation/prefix_cache.h"
#include "simulation/simulated_request.h"

namespace equipoise::requests {

struct ServerSettings {
    std::int64_t slots = 32, room = 0;
    std::int64_t prefill_chunk = 0;  // prompt tokens a step at most; 0: prompts come computed
    std::int64_t drafts = 0;         // tokens drafted a step
    double acceptance = 0;           // of each, while those before it were accepted
};

class Server {
 public:
    Server(const ServerSettings& settings, std::int32_t index, std::int64_t cached_blocks)
        : settings_(settings), index_(index), cache(cached_blocks) {}

    void push(std::int32_t job) { queue_.push_back(job); }
    void drop(std::int32_t job);  // from its queue
    // Takes from the queue, in order, what slots and KV cache have place for. `blocks(job)` are the
    // hashes of its prompt.
    template <typename Blocks>
    void admit(std::vector<Job>& jobs, std::int64_t step, double now, std::int64_t block_tokens,
               Blocks blocks, std::vector<Event>& events);
    // Tokens of prompts that the coming step computes.
    std::int64_t prefill(const std::vector<Job>& jobs) const;
    // The step happens: it ends at `now`. Returns the tokens that were made.
    std::int64_t advance(std::vector<Job>& jobs, double now, Dice& dice,
                         std::vector<Event>& events);

    std::int64_t load() const { return load_; }      // tokens in the KV cache
    std::int64_t held() const { return held_; }      // and those that admitted prompts will take
    std::int64_t waiting_tokens(const std::vector<Job>& jobs) const;
    std::int64_t waiting() const { return static_cast<std::int64_t>(queue_.size()); }
    std::int64_t admitted() const { return static_cast<std::int64_t>(admitted_.size()); }

 private:
    using End = std::pair<std::int64_t, std::int32_t>;  // tick, job

    void begin(std::vector<Job>& jobs, std::int32_t job, std::vector<Event>& events);
    std::int64_t compute_prompts(std::vector<Job>& jobs, double now,
                                 std::vector<Event>& events);
    std::int64_t make_tokens(std::vector<Job>& jobs, double now, Dice& dice,
                             std::vector<Event>& events);
    void end_due(std::vector<Job>& jobs, double now, std::vector<Event>& events);
    std::int64_t make_several(std::vector<Job>& jobs, double now, Dice& dice,
                              std::vector<Event>& events);
    void end(std::vector<Job>& jobs, std::int32_t job, double now, std::vector<Event>& events);
    void make_room(std::vector<Job>& jobs, double now, std::vector<Event>& events);
    void remove(std::vector<std::int32_t>& from, std::int32_t job);

    ServerSettings settings_;
    std::int32_t index_;
    std::int64_t load_ = 0, held_ = 0, ticks_ = 0;
    std::deque<std::int32_t> queue_;
    std::vector<std::int32_t> admitted_;  // in order of admission
    std::vector<std::int32_t> running_;   // of those, with a computed prompt
    std::vector<std::int32_t> computing_;  // of those, without, in order
    std::vector<std::int32_t> fresh_;      // without a first token
    std::priority_queue<End, std::vector<End>, std::greater<End>> ends_;

 public:
    PrefixCache cache;
};

template <typename Blocks>
void Server::admit(std::vector<Job>& jobs, std::int64_t step, double now,
                   std::int64_t block_tokens, Blocks blocks, std::vector<Event>& events) {
    while (!queue_.empty() && admitted() < settings_.slots) {
        const std::int32_t j = queue_.front();
        Job& job = jobs[j];
        const std::int64_t tokens = job.prompt + job.made;
        if (held_ + tokens > settings_.room) return;
        queue_.pop_front();
        job.fate = Fate::active;
        if (job.admitted < 0) {
            job.admitted = now;
            job.admitted_step = step;
        }
        admitted_.push_back(j);
        held_ += tokens;
        job.missing = settings_.prefill_chunk > 0 ? tokens : 0;
        const auto prompt = blocks(j);
        if (job.missing > 0 && prompt.size > 0) {
            // The last token is computed anyway: its logits are the first token's.
            const std::int64_t hit = cache.match(prompt) * block_tokens;
            job.missing -= std::min(hit, job.prompt - 1);
            cache.use(prompt);
        }
        load_ += tokens - job.missing;
        if (job.missing > 0)
            computing_.push_back(j);
        else
            begin(jobs, j, events);
    }
}

}  // namespace equipoise::requests
