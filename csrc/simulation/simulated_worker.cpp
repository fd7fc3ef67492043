#include "simulation/simulated_worker.h"

namespace equipoise::requests {

std::int64_t Server::prefill(const std::vector<Job>& jobs) const {
    std::int64_t tokens = 0;
    for (const std::int32_t j : computing_) {
        tokens += jobs[j].missing;
        if (tokens >= settings_.prefill_chunk) return settings_.prefill_chunk;
    }
    return tokens;
}

std::int64_t Server::advance(std::vector<Job>& jobs, double now, Dice& dice,
                             std::vector<Event>& events) {
    // What is computed in this step makes its first token at its end, beside the others' next one.
    const std::int64_t made = make_tokens(jobs, now, dice, events);
    const std::int64_t first = compute_prompts(jobs, now, events);
    if (held_ > settings_.room) make_room(jobs, now, events);
    return made + first;
}

std::int64_t Server::waiting_tokens(const std::vector<Job>& jobs) const {
    std::int64_t tokens = 0;
    for (const std::int32_t j : queue_) tokens += jobs[j].prompt + jobs[j].made;
    return tokens;
}

void Server::drop(std::int32_t job) {
    queue_.erase(std::find(queue_.begin(), queue_.end(), job));
}

// From now on it makes tokens.
void Server::begin(std::vector<Job>& jobs, std::int32_t j, std::vector<Event>& events) {
    Job& job = jobs[j];
    running_.push_back(j);
    events.push_back({Event::Kind::start, j});
    job.end_tick = ticks_ + job.output - job.made;
    if (settings_.drafts == 0) ends_.push({job.end_tick, j});
    if (job.first < 0) fresh_.push_back(j);
}

std::int64_t Server::compute_prompts(std::vector<Job>& jobs, double now, std::vector<Event>& events) {
    std::int64_t left = settings_.prefill_chunk;
    std::size_t done = 0;
    for (; done < computing_.size() && left > 0; ++done) {
        Job& job = jobs[computing_[done]];
        const std::int64_t tokens = std::min(left, job.missing);
        left -= tokens;
        job.missing -= tokens;
        load_ += tokens;
        if (job.missing > 0) break;
    }
    for (std::size_t i = 0; i < done; ++i) {
        const std::int32_t j = computing_[i];
        Job& job = jobs[j];
        if (job.first < 0) job.first = now;
        ++job.made;
        ++load_;
        ++held_;
        begin(jobs, j, events);
        events.push_back({Event::Kind::grow, j});
        if (job.made == job.output) end(jobs, j, now, events);
    }
    computing_.erase(computing_.begin(), computing_.begin() + static_cast<std::ptrdiff_t>(done));
    return static_cast<std::int64_t>(done);
}

std::int64_t Server::make_tokens(std::vector<Job>& jobs, double now, Dice& dice,
                                 std::vector<Event>& events) {
    if (settings_.drafts > 0) return make_several(jobs, now, dice, events);
    const auto made = static_cast<std::int64_t>(running_.size());
    ++ticks_;
    load_ += made;
    held_ += made;
    if (made > 0) events.push_back({Event::Kind::tick, index_});
    for (const std::int32_t j : fresh_) jobs[j].first = now;
    fresh_.clear();
    end_due(jobs, now, events);
    return made;
}

void Server::end_due(std::vector<Job>& jobs, double now, std::vector<Event>& events) {
    while (!ends_.empty() && ends_.top().first <= ticks_) {
        const auto [tick, j] = ends_.top();
        ends_.pop();
        // An entry of a time before it was put back, or before its first token was counted.
        if (jobs[j].fate != Fate::active || jobs[j].end_tick != tick) continue;
        end(jobs, j, now, events);
    }
}

// Speculative decoding: one token, and as many drafted ones as are accepted in a row.
std::int64_t Server::make_several(std::vector<Job>& jobs, double now, Dice& dice,
                                  std::vector<Event>& events) {
    std::int64_t all = 0;
    for (const std::int32_t j : fresh_) jobs[j].first = now;
    fresh_.clear();
    const std::vector<std::int32_t> running = running_;
    for (const std::int32_t j : running) {
        Job& job = jobs[j];
        std::int64_t tokens = 1;
        while (tokens <= settings_.drafts && dice.uniform() < settings_.acceptance) ++tokens;
        tokens = std::min(tokens, job.output - job.made);
        job.made += tokens;
        load_ += tokens;
        held_ += tokens;
        all += tokens;
        events.push_back({Event::Kind::grow, j, tokens});
        if (job.made == job.output) end(jobs, j, now, events);
    }
    return all;
}

void Server::end(std::vector<Job>& jobs, std::int32_t j, double now, std::vector<Event>& events) {
    Job& job = jobs[j];
    job.made = job.output;
    job.end = now;
    job.fate = Fate::finished;
    load_ -= job.prompt + job.output;
    held_ -= job.prompt + job.output;
    remove(running_, j);
    remove(admitted_, j);
    events.push_back({Event::Kind::finish, j});
}

// The KV cache is full: who was admitted last goes back to the head of the queue, to be computed
// anew. A request that fills the cache alone fails.
void Server::make_room(std::vector<Job>& jobs, double now, std::vector<Event>& events) {
    while (held_ > settings_.room) {
        const std::int32_t j = admitted_.back();
        Job& job = jobs[j];
        const bool computed = job.missing == 0;
        if (computed && settings_.drafts == 0)
            job.made = job.output - (job.end_tick - ticks_);
        const std::int64_t tokens = job.prompt + job.made;
        load_ -= tokens - job.missing;
        held_ -= tokens;
        remove(admitted_, j);
        remove(computed ? running_ : computing_, j);
        if (admitted_.empty() || tokens > settings_.room) {
            job.fate = Fate::failed;
            job.end = now;
            events.push_back({Event::Kind::fail, j});
            continue;
        }
        job.fate = Fate::waiting;
        job.end_tick = -1;
        ++job.preemptions;
        queue_.push_front(j);
        if (computed) events.push_back({Event::Kind::pause, j});
    }
}

void Server::remove(std::vector<std::int32_t>& from, std::int32_t job) {
    from.erase(std::find(from.begin(), from.end(), job));
}

}  // namespace equipoise::requests
