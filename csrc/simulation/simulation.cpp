#include "simulation/simulation.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace equipoise::requests {

Simulation::Simulation(const SimulationSettings& settings, std::vector<Job> jobs,
                       std::vector<std::int64_t> hashes, std::vector<std::int64_t> offsets)
    : settings_(settings),
      jobs_(std::move(jobs)),
      hashes_(std::move(hashes)),
      offsets_(std::move(offsets)),
      dice_(settings.seed),
      work_(settings.workers) {
    for (std::int64_t w = 0; w < settings.workers; ++w)
        servers_.emplace_back(settings.server, static_cast<std::int32_t>(w),
                              settings.cached_blocks);
    for (std::int64_t f = 0; f < settings.front_ends; ++f) {
        PolicySettings policy = settings.policy;
        policy.front_ends = settings.front_ends;
        policy.front_end = f;
        policy.seed = settings.seed * 1000003 + static_cast<std::uint64_t>(f);
        Told front;
        front.router = std::make_unique<Router>(policy, servers_.size(), settings.server.slots,
                                                settings.server.room);
        fronts_.push_back(std::move(front));
    }
}

bool Simulation::run(std::int64_t steps) {
    const auto all = static_cast<std::int64_t>(jobs_.size());
    while (done_ < all && steps-- > 0) {
        arrive();
        if (settings_.patience > 0) {
            lose_patience();
            arrive();  // in the places of those that gave up
        }
        tell();
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

Span<const std::int64_t> Simulation::blocks(std::int32_t job) const {
    if (offsets_.empty()) return {nullptr, 0};
    const std::int64_t first = offsets_[job];
    return {hashes_.data() + first, static_cast<std::size_t>(offsets_[job + 1] - first)};
}

void Simulation::arrive() {
    const auto all = static_cast<std::int64_t>(jobs_.size());
    std::int64_t waiting = std::min(queued(), settings_.backlog);
    while (next_ < all) {
        Job& job = jobs_[next_];
        if (settings_.backlog > 0) {
            if (waiting == settings_.backlog) return;
            job.arrival = clock_;
        } else if (job.arrival > clock_) {
            return;
        }
        arrive(static_cast<std::int32_t>(next_++));
        waiting += job.fate == Fate::waiting;  // what cannot be served takes nobody's place
    }
}

void Simulation::arrive(std::int32_t j) {
    Job& job = jobs_[j];
    job.fate = Fate::waiting;
    if (job.prompt > settings_.server.room) return fail(j);
    Request request;
    request.size = job.prompt;
    request.expected = job.output;
    if (settings_.cached_blocks > 0 && !offsets_.empty()) request.hits = hits(j);
    Told& front = front_of(j);
    job.handle = front.router->fleet().arrive(std::move(request));
    if (front.job_of.size() <= static_cast<std::size_t>(job.handle))
        front.job_of.resize(static_cast<std::size_t>(job.handle) + 1);
    front.job_of[job.handle] = j;
    if (settings_.patience > 0) waiting_.push_back(j);
}

std::vector<std::int32_t> Simulation::hits(std::int32_t job) const {
    std::vector<std::int32_t> tokens;
    for (const Server& server : servers_)
        tokens.push_back(
            static_cast<std::int32_t>(server.cache.match(blocks(job)) * settings_.block_tokens));
    return tokens;
}

// Nobody waits for an answer any more: its front end gives it up, and its worker.
void Simulation::lose_patience() {
    std::size_t kept = 0;
    for (const std::int32_t j : waiting_) {
        if (jobs_[j].fate != Fate::waiting || jobs_[j].admitted >= 0) continue;
        // The same sum as in `skip_ahead`, so that time that comes there is up here.
        if (clock_ < jobs_[j].arrival + settings_.patience) {
            waiting_[kept++] = j;
            continue;
        }
        front_of(j).router->fleet().leave(jobs_[j].handle);
        if (jobs_[j].worker >= 0) servers_[jobs_[j].worker].drop(j);
        fail(j);
    }
    waiting_.resize(kept);
}

void Simulation::fail(std::int32_t j) {
    jobs_[j].fate = Fate::failed;
    jobs_[j].end = clock_;
    ++done_;
}

void Simulation::tell() {
    if (clock_ < next_tell_) return;
    next_tell_ = clock_ + settings_.tell_every;
    for (Told& front : fronts_) {
        for (const Event& event : front.events) tell(front, event);
        front.events.clear();
    }
}

void Simulation::tell(Told& front, const Event& event) {
    Fleet& fleet = front.router->fleet();
    if (event.kind == Event::Kind::tick) return fleet.tick(event.subject);
    const std::int32_t handle = jobs_[event.subject].handle;
    switch (event.kind) {
        case Event::Kind::start:
            return fleet.start(handle);
        case Event::Kind::grow:
            return fleet.grow(handle, event.tokens);
        case Event::Kind::pause:
            return fleet.pause(handle);
        case Event::Kind::fail:
            fleet.leave(handle);
            return;
        default:
            return front.router->finish(handle);
    }
}

void Simulation::report() {
    if (clock_ < next_report_) return;
    next_report_ = clock_ + settings_.report_every;
    for (std::size_t w = 0; w < servers_.size(); ++w) {
        const Server& server = servers_[w];
        Report report;
        report.waiting = server.waiting();
        report.running = server.admitted();
        report.tokens = server.held() + server.waiting_tokens(jobs_);
        const auto room = static_cast<double>(settings_.server.room);
        report.kv_usage = static_cast<double>(server.held()) / room;
        for (Told& front : fronts_) 
            front.router->fleet().set_report(static_cast<std::int32_t>(w), report);
    }
}

void Simulation::decide() {
    for (Told& front : fronts_)
        for (const Binding& binding : front.router->dispatch()) {
            const std::int32_t j = front.job_of[binding.request];
            jobs_[j].worker = binding.worker;
            servers_[binding.worker].push(j);
        }
}

void Simulation::admit() {
    const auto step = static_cast<std::int64_t>(record_.clock.size());
    events_.clear();
    for (Server& server : servers_)
        server.admit(
            jobs_, step, clock_, settings_.block_tokens,
            [this](std::int32_t j) { return blocks(j); }, events_);
    hand_out(events_);
}

// Requests that nobody serves yet.
std::int64_t Simulation::queued() const {
    std::int64_t count = 0;
    for (const Told& front : fronts_) count += front.router->fleet().pooled();
    for (const Server& server : servers_) count += server.waiting();
    return count;
}

bool Simulation::idle() const {
    return std::all_of(servers_.begin(), servers_.end(),
                       [](const Server& server) { return server.admitted() == 0; });
}

// Nothing runs: the next thing that happens is an arrival, or that a front end is told something.
bool Simulation::skip_ahead() {
    double next = INFINITY;
    if (settings_.backlog == 0 && next_ < static_cast<std::int64_t>(jobs_.size()))
        next = jobs_[next_].arrival;
    for (const Told& front : fronts_)
        if (!front.events.empty()) next = std::min(next, next_tell_);
    if (settings_.patience > 0 && !waiting_.empty())
        next = std::min(next, jobs_[waiting_.front()].arrival + settings_.patience);
    if (next_report_ > clock_ && queued() > 0) next = std::min(next, next_report_);
    if (!(next > clock_) || std::isinf(next)) return false;
    clock_ = next;
    return true;
}

void Simulation::measure(double& largest, double& sum, double& seconds) {
    largest = sum = 0;
    for (std::size_t w = 0; w < servers_.size(); ++w) {
        double work = static_cast<double>(servers_[w].load());
        if (settings_.server.prefill_chunk > 0)
            work += settings_.prompt_weight * static_cast<double>(servers_[w].prefill(jobs_));
        if (settings_.noise > 0) work *= std::exp(settings_.noise * dice_.normal());
        work_[w] = work;
        largest = std::max(largest, work);
        sum += work;
    }
    const double mean = sum / static_cast<double>(servers_.size());
    seconds = settings_.fixed + settings_.per_token * largest + settings_.per_mean * mean;
}

void Simulation::step() {
    double largest = 0, sum = 0, seconds = 0;
    measure(largest, sum, seconds);
    const double mean = sum / static_cast<double>(servers_.size());
    std::int64_t active = 0, tokens = 0;
    if (static_cast<std::int64_t>(record_.clock.size()) < settings_.trajectory)
        for (const Server& server : servers_) record_.loads.push_back(server.load());
    record_.clock.push_back(clock_);
    clock_ += seconds;
    events_.clear();
    for (Server& server : servers_) {
        active += server.admitted();
        tokens += server.advance(jobs_, clock_, dice_, events_);
    }
    for (const Event& event : events_)
        done_ += event.kind == Event::Kind::finish || event.kind == Event::Kind::fail;
    hand_out(events_);
    record_.seconds.push_back(seconds);
    record_.ideal_seconds.push_back(settings_.fixed +
                                    (settings_.per_token + settings_.per_mean) * mean);
    record_.largest.push_back(largest);
    record_.sum.push_back(sum);
    record_.tokens.push_back(tokens);
    record_.active.push_back(active);
    record_.waiting.push_back(queued());
}

void Simulation::hand_out(const std::vector<Event>& events) {
    for (const Event& event : events) {
        if (event.kind != Event::Kind::tick) {
            front_of(event.subject).events.push_back(event);
            continue;
        }
        for (Told& front : fronts_) front.events.push_back(event);
    }
}

}  // namespace equipoise::requests
