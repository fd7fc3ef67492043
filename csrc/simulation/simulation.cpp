#include "simulation/simulation.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace equipoise::requests {

Simulation::Simulation(const SimulationSettings& settings, std::vector<SimulatedRequest> requests,
                       std::vector<std::int64_t> hashes, std::vector<std::int64_t> offsets)
    : settings_(settings),
      requests_(std::move(requests)),
      hashes_(std::move(hashes)),
      offsets_(std::move(offsets)),
      rng_(settings.seed),
      work_(settings.workers),
      prefill_alignment_(make_prefill_alignment(settings.prefill_rule, settings.prefill_limit,
                                                static_cast<std::size_t>(settings.workers))),
      permissions_(settings.workers) {
    for (std::int64_t w = 0; w < settings.workers; ++w)
        workers_.emplace_back(settings.server, settings.slots.at(w), static_cast<std::int32_t>(w),
                              settings.cached_blocks);
    for (std::int64_t f = 0; f < settings.front_ends; ++f) {
        PolicySettings policy = settings.policy;
        policy.front_ends = settings.front_ends;
        policy.front_end = f;
        // A stream of random numbers for each front end: with the same one all would draw alike.
        policy.seed = settings.seed * 1000003 + static_cast<std::uint64_t>(f);
        FrontEnd front;
        front.router = std::make_unique<Router>(policy, workers_.size(), kUnlimited,
                                                settings.server.room);
        RouterState& state = front.router->state();
        state.set_step_end(StepEnd::caller);
        for (std::int64_t w = 0; w < settings.workers; ++w)
            state.set_capacity(static_cast<std::int32_t>(w), settings.slots[w],
                               settings.server.room);
        front_ends_.push_back(std::move(front));
    }
}

bool Simulation::run(std::int64_t steps) {
    const auto all = static_cast<std::int64_t>(requests_.size());
    while (done_ < all && steps-- > 0) {
        arrive();
        if (settings_.queue_timeout > 0) {
            fail_impatient();
            arrive();  // a backlog is filled up for those that gave up
        }
        deliver_events();
        report();
        decide();
        admit();
        if (!idle())
            step();
        else if (done_ < all && !skip_ahead())
            throw RouterError("nothing can go on: " + std::to_string(all - done_) +
                              " requests are left and the policy binds none");
    }
    return done_ < all;
}

std::vector<double> Simulation::fitted_prompt_weights() const {
    std::vector<double> weights;
    for (const FrontEnd& front : front_ends_)
        weights.push_back(front.router->state().fitted_prompt_weight());
    return weights;
}

Span<const std::int64_t> Simulation::blocks(std::int32_t request) const {
    if (offsets_.empty()) return {nullptr, 0};
    const std::int64_t first = offsets_[request];
    return {hashes_.data() + first, static_cast<std::size_t>(offsets_[request + 1] - first)};
}

void Simulation::arrive() {
    const auto all = static_cast<std::int64_t>(requests_.size());
    std::int64_t waiting = std::min(queued(), settings_.backlog);
    while (next_ < all) {
        SimulatedRequest& request = requests_[next_];
        if (settings_.backlog > 0) {
            if (waiting == settings_.backlog) return;
            request.arrival = clock_;
        } else if (request.arrival > clock_) {
            return;
        }
        arrive(static_cast<std::int32_t>(next_++));
        waiting +=
            request.fate == RequestFate::waiting;  // a request that cannot be served does not count
    }
}

void Simulation::arrive(std::int32_t j) {
    SimulatedRequest& request = requests_[j];
    request.fate = RequestFate::waiting;
    if (request.prompt > settings_.server.room) return fail(j);
    Request arriving;
    arriving.size = request.prompt;
    arriving.expected = request.output;
    if (settings_.cached_blocks > 0 && !offsets_.empty()) arriving.hits = cached_tokens(j);
    FrontEnd& front = front_end_of(j);
    request.handle = front.router->state().arrive(std::move(arriving));
    if (front.request_of.size() <= static_cast<std::size_t>(request.handle))
        front.request_of.resize(static_cast<std::size_t>(request.handle) + 1);
    front.request_of[request.handle] = j;
    if (settings_.queue_timeout > 0) waiting_.push_back(j);
}

std::vector<std::int32_t> Simulation::cached_tokens(std::int32_t request) const {
    std::vector<std::int32_t> tokens;
    for (const SimulatedWorker& worker : workers_)
        tokens.push_back(static_cast<std::int32_t>(worker.cache.match(blocks(request)) *
                                                   settings_.block_tokens));
    return tokens;
}

// Fails waiting requests whose client has given up: their front end and their worker drop them.
void Simulation::fail_impatient() {
    std::size_t kept = 0;
    for (const std::int32_t j : waiting_) {
        if (requests_[j].fate != RequestFate::waiting || requests_[j].admitted >= 0) continue;
        // The same sum as in skip_ahead, bit for bit: a clock that was set to it has to pass here.
        if (clock_ < requests_[j].arrival + settings_.queue_timeout) {
            waiting_[kept++] = j;
            continue;
        }
        front_end_of(j).router->state().leave(requests_[j].handle);
        if (requests_[j].worker >= 0) workers_[requests_[j].worker].drop(j);
        fail(j);
    }
    waiting_.resize(kept);
}

void Simulation::fail(std::int32_t j) {
    requests_[j].fate = RequestFate::failed;
    requests_[j].end = clock_;
    ++done_;
}

void Simulation::deliver_events() {
    if (clock_ < next_front_end_update_) return;
    next_front_end_update_ = clock_ + settings_.token_delay;
    for (FrontEnd& front : front_ends_) {
        for (const WorkerEvent& event : front.events) deliver_events(front, event);
        front.events.clear();
    }
}

void Simulation::deliver_events(FrontEnd& front, const WorkerEvent& event) {
    RouterState& state = front.router->state();
    if (event.kind == WorkerEvent::Kind::tick) return state.tick(event.subject);
    const std::int32_t handle = requests_[event.subject].handle;
    switch (event.kind) {
        case WorkerEvent::Kind::start:
            return state.start(handle);
        case WorkerEvent::Kind::grow:
            return state.grow(handle, event.tokens);
        case WorkerEvent::Kind::pause:
            return state.pause(handle);
        case WorkerEvent::Kind::fail:
            state.leave(handle);
            return;
        default:
            return front.router->finish(handle);
    }
}

void Simulation::report() {
    if (clock_ < next_report_) return;
    next_report_ = clock_ + settings_.report_interval;
    for (std::size_t w = 0; w < workers_.size(); ++w) {
        const SimulatedWorker& worker = workers_[w];
        WorkerReport report;
        report.waiting = worker.waiting();
        report.running = worker.admitted();
        report.tokens = worker.reserved() + worker.waiting_tokens(requests_);
        // Of a cache without bound nothing is used, not even a rounding error.
        if (settings_.server.room < kUnlimited)
            report.kv_usage = static_cast<double>(worker.reserved()) /
                              static_cast<double>(settings_.server.room);
        for (FrontEnd& front : front_ends_)
            front.router->state().set_report(static_cast<std::int32_t>(w), report);
    }
}

void Simulation::decide() {
    for (FrontEnd& front : front_ends_) {
        // Where tokens are told late, several steps come at once, and no time of one is known.
        if (settings_.token_delay == 0) front.router->state().set_time(clock_);
        for (const Binding& binding : front.router->dispatch()) {
            const std::int32_t j = front.request_of[binding.request];
            requests_[j].worker = binding.worker;
            workers_[binding.worker].push(j);
        }
    }
}

void Simulation::admit() {
    const auto step = static_cast<std::int64_t>(record_.clock.size());
    events_.clear();
    align_prefill();
    for (std::size_t w = 0; w < workers_.size(); ++w) {
        SimulatedWorker& worker = workers_[w];
        worker.set_computing(permissions_[w].compute);
        if (permissions_[w].admit)
            worker.admit(
                requests_, step, clock_, settings_.block_tokens,
                [this](std::int32_t j) { return blocks(j); }, events_);
        if (prefill_alignment_) prefill_alignment_->admitted(w, worker.waiting());
    }
    queue_events(events_);
}

void Simulation::align_prefill() {
    if (!prefill_alignment_) return;
    std::vector<PrefillState> states;
    for (const SimulatedWorker& worker : workers_)
        states.push_back(worker.prefill_state(requests_));
    permissions_.assign(workers_.size(), {});
    prefill_alignment_->decide(states, permissions_);
}

// Requests that no worker serves yet.
std::int64_t Simulation::queued() const {
    std::int64_t count = 0;
    for (const FrontEnd& front : front_ends_) count += front.router->state().pooled();
    for (const SimulatedWorker& worker : workers_) count += worker.waiting();
    return count;
}

bool Simulation::idle() const {
    return std::all_of(workers_.begin(), workers_.end(),
                       [](const SimulatedWorker& worker) { return worker.admitted() == 0; });
}

// Nothing runs, so the clock moves to the next event: an arrival, news for a front end, a client
// that gives up, or a report that a policy waits for. Returns false if there is none.
bool Simulation::skip_ahead() {
    double next = INFINITY;
    if (settings_.backlog == 0 && next_ < static_cast<std::int64_t>(requests_.size()))
        next = requests_[next_].arrival;
    for (const FrontEnd& front : front_ends_)
        if (!front.events.empty()) next = std::min(next, next_front_end_update_);
    if (settings_.queue_timeout > 0 && !waiting_.empty())
        next = std::min(next, requests_[waiting_.front()].arrival + settings_.queue_timeout);
    if (next_report_ > clock_ && queued() > 0) next = std::min(next, next_report_);
    if (!(next > clock_) || std::isinf(next)) return false;
    clock_ = next;
    return true;
}

void Simulation::measure(double& largest, double& sum, double& seconds) {
    largest = sum = 0;
    for (std::size_t w = 0; w < workers_.size(); ++w) {
        double work = static_cast<double>(workers_[w].load());
        if (settings_.server.prefill_chunk > 0)
            work += settings_.prompt_weight * static_cast<double>(workers_[w].prefill(requests_));
        if (settings_.noise > 0) work *= std::exp(settings_.noise * rng_.normal());
        work_[w] = work;
        largest = std::max(largest, work);
        sum += work;
    }
    // The slowest worker decides, because all meet at a barrier.
    const double mean = sum / static_cast<double>(workers_.size());
    seconds = settings_.fixed + settings_.per_token * largest + settings_.per_mean * mean;
}

void Simulation::step() {
    double largest = 0, sum = 0, seconds = 0;
    measure(largest, sum, seconds);
    const double mean = sum / static_cast<double>(workers_.size());
    std::int64_t active = 0, tokens = 0;
    if (static_cast<std::int64_t>(record_.clock.size()) < settings_.trajectory)
        for (const SimulatedWorker& worker : workers_) record_.loads.push_back(worker.load());
    record_.clock.push_back(clock_);
    clock_ += seconds;
    events_.clear();
    for (SimulatedWorker& worker : workers_) {
        active += worker.admitted();
        tokens += worker.advance(requests_, clock_, rng_, events_);
    }
    for (const WorkerEvent& event : events_)
        done_ += event.kind == WorkerEvent::Kind::finish || event.kind == WorkerEvent::Kind::fail;
    queue_events(events_);
    record_.seconds.push_back(seconds);
    record_.ideal_seconds.push_back(settings_.fixed +
                                    (settings_.per_token + settings_.per_mean) * mean);
    record_.largest.push_back(largest);
    record_.sum.push_back(sum);
    record_.tokens.push_back(tokens);
    record_.active.push_back(active);
    record_.waiting.push_back(queued());
}

// Ticks concern every front end with requests on the worker; other events the one of the request.
void Simulation::queue_events(const std::vector<WorkerEvent>& events) {
    for (const WorkerEvent& event : events) {
        if (event.kind != WorkerEvent::Kind::tick) {
            front_end_of(event.subject).events.push_back(event);
            continue;
        }
        for (FrontEnd& front : front_ends_) front.events.push_back(event);
    }
}

}  // namespace equipoise::requests
