#include "simulation/simulated_worker.h"

namespace equipoise::requests {

std::int64_t SimulatedWorker::prefill(const std::vector<SimulatedRequest>& requests) const {
    std::int64_t tokens = 0;
    if (!computes_) return 0;
    for (const std::int32_t j : computing_) {
        tokens += requests[j].missing;
        if (tokens >= settings_.prefill_chunk) return settings_.prefill_chunk;
    }
    return tokens;
}

PrefillState SimulatedWorker::prefill_state(const std::vector<SimulatedRequest>& requests) const {
    const auto decoding = static_cast<std::int64_t>(running_.size());
    return {!computing_.empty(), has_room_for_next(requests), decoding >= slots_, decoding};
}

std::int64_t SimulatedWorker::advance(std::vector<SimulatedRequest>& requests, double now,
                                      CounterRng& rng, std::vector<WorkerEvent>& events) {
    // Tokens first: a prompt that is computed in this step makes its first token at its end, and no
    // second one.
    const std::int64_t made = generate_tokens(requests, now, rng, events);
    const std::int64_t first = compute_prompts(requests, now, events);
    if (reserved_ > settings_.room) make_room(requests, now, events);
    return made + first;
}

std::int64_t SimulatedWorker::waiting_tokens(const std::vector<SimulatedRequest>& requests) const {
    std::int64_t tokens = 0;
    for (const std::int32_t j : queue_) tokens += requests[j].prompt + requests[j].made;
    return tokens;
}

void SimulatedWorker::drop(std::int32_t request) {
    queue_.erase(std::find(queue_.begin(), queue_.end(), request));
}

// The prompt is computed: the request makes a token at every step from now on.
void SimulatedWorker::begin_generating(std::vector<SimulatedRequest>& requests, std::int32_t j,
                                       std::vector<WorkerEvent>& events) {
    SimulatedRequest& request = requests[j];
    running_.push_back(j);
    events.push_back({WorkerEvent::Kind::start, j});
    request.end_tick = ticks_ + request.output - request.made;
    if (settings_.drafts == 0) ends_.push({request.end_tick, j});
    if (request.first < 0) fresh_.push_back(j);
}

std::int64_t SimulatedWorker::compute_prompts(std::vector<SimulatedRequest>& requests, double now,
                                              std::vector<WorkerEvent>& events) {
    std::int64_t left = computes_ ? settings_.prefill_chunk : 0;
    std::size_t done = 0;
    for (; done < computing_.size() && left > 0; ++done) {
        SimulatedRequest& request = requests[computing_[done]];
        const std::int64_t tokens = std::min(left, request.missing);
        left -= tokens;
        request.missing -= tokens;
        load_ += tokens;
        if (request.missing > 0) break;
    }
    for (std::size_t i = 0; i < done; ++i) {
        const std::int32_t j = computing_[i];
        SimulatedRequest& request = requests[j];
        if (request.first < 0) request.first = now;
        ++request.made;
        ++load_;
        ++reserved_;
        begin_generating(requests, j, events);
        events.push_back({WorkerEvent::Kind::grow, j});
        if (request.made == request.output) end(requests, j, now, events);
    }
    computing_.erase(computing_.begin(), computing_.begin() + static_cast<std::ptrdiff_t>(done));
    return static_cast<std::int64_t>(done);
}

std::int64_t SimulatedWorker::generate_tokens(std::vector<SimulatedRequest>& requests, double now,
                                              CounterRng& rng, std::vector<WorkerEvent>& events) {
    if (settings_.drafts > 0) return generate_speculatively(requests, now, rng, events);
    const auto made = static_cast<std::int64_t>(running_.size());
    ++ticks_;
    load_ += made;
    reserved_ += made;
    if (made > 0) events.push_back({WorkerEvent::Kind::tick, index_});
    for (const std::int32_t j : fresh_) requests[j].first = now;
    fresh_.clear();
    end_finished(requests, now, events);
    return made;
}

void SimulatedWorker::end_finished(std::vector<SimulatedRequest>& requests, double now,
                                   std::vector<WorkerEvent>& events) {
    while (!ends_.empty() && ends_.top().first <= ticks_) {
        const auto [tick, j] = ends_.top();
        ends_.pop();
        // Entries are not removed when a request is preempted or gets a new end: skip those.
        if (requests[j].fate != RequestFate::active || requests[j].end_tick != tick) continue;
        end(requests, j, now, events);
    }
}

// Speculative decoding: each request makes one token and as many drafted ones as are accepted in a
// row, so ends are not known ahead.
std::int64_t SimulatedWorker::generate_speculatively(std::vector<SimulatedRequest>& requests,
                                                     double now, CounterRng& rng,
                                                     std::vector<WorkerEvent>& events) {
    std::int64_t all = 0;
    for (const std::int32_t j : fresh_) requests[j].first = now;
    fresh_.clear();
    // A copy, because `end` changes the list.
    const std::vector<std::int32_t> running = running_;
    for (const std::int32_t j : running) {
        SimulatedRequest& request = requests[j];
        std::int64_t tokens = 1;
        while (tokens <= settings_.drafts && rng.uniform() < settings_.acceptance) ++tokens;
        tokens = std::min(tokens, request.output - request.made);
        request.made += tokens;
        load_ += tokens;
        reserved_ += tokens;
        all += tokens;
        events.push_back({WorkerEvent::Kind::grow, j, tokens});
        if (request.made == request.output) end(requests, j, now, events);
    }
    return all;
}

void SimulatedWorker::end(std::vector<SimulatedRequest>& requests, std::int32_t j, double now,
                          std::vector<WorkerEvent>& events) {
    SimulatedRequest& request = requests[j];
    request.made = request.output;
    request.end = now;
    request.fate = RequestFate::finished;
    load_ -= request.prompt + request.output;
    reserved_ -= request.prompt + request.output;
    remove(running_, j);
    remove(admitted_, j);
    events.push_back({WorkerEvent::Kind::finish, j});
}

// The KV cache is full: preempts the request that was admitted last, as engines do. It goes back to
// the head of the queue, and is computed anew. A request that fills the cache alone can never end,
// and fails.
void SimulatedWorker::make_room(std::vector<SimulatedRequest>& requests, double now,
                                std::vector<WorkerEvent>& events) {
    while (reserved_ > settings_.room) {
        const std::int32_t j = admitted_.back();
        SimulatedRequest& request = requests[j];
        const bool computed = request.missing == 0;
        if (computed && settings_.drafts == 0)
            request.made = request.output - (request.end_tick - ticks_);
        const std::int64_t tokens = request.prompt + request.made;
        load_ -= tokens - request.missing;
        reserved_ -= tokens;
        remove(admitted_, j);
        remove(computed ? running_ : computing_, j);
        if (admitted_.empty() || tokens > settings_.room) {
            request.fate = RequestFate::failed;
            request.end = now;
            events.push_back({WorkerEvent::Kind::fail, j});
            continue;
        }
        request.fate = RequestFate::waiting;
        request.end_tick = -1;
        ++request.preemptions;
        queue_.push_front(j);
        if (computed) events.push_back({WorkerEvent::Kind::pause, j});
    }
}

void SimulatedWorker::remove(std::vector<std::int32_t>& from, std::int32_t request) {
    from.erase(std::find(from.begin(), from.end(), request));
}

}  // namespace equipoise::requests
