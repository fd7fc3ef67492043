// One worker of the simulation: its queue, its slots, its KV cache.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <queue>
#include <utility>

#include "common/random.h"
#include "simulation/prefill_alignment.h"
#include "simulation/prefix_cache.h"
#include "simulation/simulated_request.h"

namespace equipoise::requests {

// `_native.ServerSettings` in Python.
struct SimulatedWorkerSettings {
    std::int64_t room = 0;           // tokens in the KV cache
    std::int64_t prefill_chunk = 0;  // most prompt tokens per step; 0: prompts come computed
    std::int64_t drafts = 0;            // drafted tokens per step (speculative decoding)
    double acceptance = 0;  // chance of a drafted token, if those before it are accepted
};

class SimulatedWorker {
 public:
    // `slots`: requests at once.
    SimulatedWorker(const SimulatedWorkerSettings& settings, std::int64_t slots, std::int32_t index,
                    std::int64_t cached_blocks)
        : settings_(settings), slots_(slots), index_(index), cache(cached_blocks) {}

    void push(std::int32_t request) { queue_.push_back(request); }
    void drop(std::int32_t request);  // from its queue
    // Admits requests from the queue, in order, while there are slots and KV cache for the next
    // one. `blocks(request)` are the block hashes of its prompt.
    template <typename Blocks>
    void admit(std::vector<SimulatedRequest>& requests, std::int64_t step, double now,
               std::int64_t block_tokens, Blocks blocks, std::vector<WorkerEvent>& events);
    // Whether the coming step computes prompts.
    void set_computing(bool computes) { computes_ = computes; }
    PrefillState prefill_state(const std::vector<SimulatedRequest>& requests) const;
    // Prompt tokens that the coming step computes.
    std::int64_t prefill(const std::vector<SimulatedRequest>& requests) const;
    // Runs a step that ends at `now`. Returns the tokens that it made.
    std::int64_t advance(std::vector<SimulatedRequest>& requests, double now, CounterRng& rng,
                         std::vector<WorkerEvent>& events);

    // Tokens in the KV cache; and with those that admitted prompts will take.
    std::int64_t load() const { return load_; }
    std::int64_t reserved() const { return reserved_; }
    std::int64_t waiting_tokens(const std::vector<SimulatedRequest>& requests) const;
    std::int64_t waiting() const { return static_cast<std::int64_t>(queue_.size()); }
    std::int64_t admitted() const { return static_cast<std::int64_t>(admitted_.size()); }

 private:
    // Whether the first of its queue has a slot, and KV cache.
    bool has_room_for_next(const std::vector<SimulatedRequest>& requests) const {
        return !queue_.empty() && admitted() < slots_ &&
               reserved_ + tokens_of(requests[queue_.front()]) <= settings_.room;
    }
    static std::int64_t tokens_of(const SimulatedRequest& request) {
        return request.prompt + request.made;
    }
    using End = std::pair<std::int64_t, std::int32_t>;  // tick, request

    void begin_generating(std::vector<SimulatedRequest>& requests, std::int32_t request,
                          std::vector<WorkerEvent>& events);
    std::int64_t compute_prompts(std::vector<SimulatedRequest>& requests, double now,
                                 std::vector<WorkerEvent>& events);
    std::int64_t generate_tokens(std::vector<SimulatedRequest>& requests, double now,
                                 CounterRng& rng, std::vector<WorkerEvent>& events);
    void end_finished(std::vector<SimulatedRequest>& requests, double now,
                      std::vector<WorkerEvent>& events);
    std::int64_t generate_speculatively(std::vector<SimulatedRequest>& requests, double now,
                                        CounterRng& rng, std::vector<WorkerEvent>& events);
    void end(std::vector<SimulatedRequest>& requests, std::int32_t request, double now,
             std::vector<WorkerEvent>& events);
    void make_room(std::vector<SimulatedRequest>& requests, double now,
                   std::vector<WorkerEvent>& events);
    void remove(std::vector<std::int32_t>& from, std::int32_t request);

    SimulatedWorkerSettings settings_;
    std::int64_t slots_;
    std::int32_t index_;
    bool computes_ = true;
    std::int64_t load_ = 0, reserved_ = 0, ticks_ = 0;
    std::deque<std::int32_t> queue_;
    std::vector<std::int32_t> admitted_;   // in order of admission
    std::vector<std::int32_t> running_;    // of those, with a computed prompt
    std::vector<std::int32_t> computing_;  // of those, without, in order
    std::vector<std::int32_t> fresh_;      // without a first token
    std::priority_queue<End, std::vector<End>, std::greater<End>> ends_;

 public:
    PrefixCache cache;
};

template <typename Blocks>
void SimulatedWorker::admit(std::vector<SimulatedRequest>& requests, std::int64_t step, double now,
                            std::int64_t block_tokens, Blocks blocks,
                            std::vector<WorkerEvent>& events) {
    // In order: a smaller request does not overtake.
    while (has_room_for_next(requests)) {
        const std::int32_t j = queue_.front();
        SimulatedRequest& request = requests[j];
        const std::int64_t tokens = tokens_of(request);
        queue_.pop_front();
        request.fate = RequestFate::active;
        if (request.admitted < 0) {
            request.admitted = now;
            request.admitted_step = step;
        }
        admitted_.push_back(j);
        reserved_ += tokens;
        request.missing = settings_.prefill_chunk > 0 ? tokens : 0;
        const auto prompt = blocks(j);
        if (request.missing > 0 && prompt.size > 0) {
            // The last token is computed even if it is cached: its logits give the first token.
            const std::int64_t hit = cache.match(prompt) * block_tokens;
            request.missing -= std::min(hit, request.prompt - 1);
            cache.use(prompt);
        }
        load_ += tokens - request.missing;
        if (request.missing > 0)
            computing_.push_back(j);
        else
            begin_generating(requests, j, events);
    }
}

}  // namespace equipoise::requests
