#include "requests/router_state.h"

#include <algorithm>
#include <string>
#include <utility>

namespace equipoise::requests {
namespace {

const char* name_of(Stage stage) {
    switch (stage) {
        case Stage::pooled:
            return "pooled";
        case Stage::bound:
            return "bound";
        case Stage::running:
            return "running";
        default:
            return "gone";
    }
}

}  // namespace

Fleet::Fleet(std::size_t workers, std::int64_t slots, std::int64_t room, std::int64_t front_ends,
             bool strands)
    : workers_(workers), front_ends_(front_ends), strands_(strands) {
    for (Worker& worker : workers_) {
        worker.alike = front_ends;
        worker.slots = std::min(slots, kUnlimited);
        worker.room = std::min(room, kUnlimited);
    }
    look_for_room();
}

std::int32_t Fleet::arrive(Request request) {
    if (request.pinned >= 0 && !worker_at(request.pinned).serves())
        throw WorkerRefused("worker " + std::to_string(request.pinned) + " takes no requests");
    std::int32_t r = static_cast<std::int32_t>(requests_.size());
    if (spare_.empty()) {
        requests_.emplace_back();
    } else {
        r = spare_.back();
        spare_.pop_back();
    }
    request.stage = Stage::pooled;
    request.order = arrivals_++;
    requests_[r] = std::move(request);
    insert(r);
    return r;
}

void Fleet::start(std::int32_t r) {
    Request& request = at(r, Stage::bound, Stage::bound, "start");
    Worker& worker = workers_[request.worker];
    request.stage = Stage::running;
    request.base = worker.ticks - request.made;
    worker.running += request.made == 0;
    ++worker.ticking;
    expect(request, 0);
}

void Fleet::pause(std::int32_t r) {
    Request& request = at(r, Stage::running, Stage::running, "pause");
    request.made = age(request);
    request.stage = Stage::bound;
    --workers_[request.worker].ticking;
}

void Fleet::grow(std::int32_t r, std::int64_t tokens) {
    Request& request = at(r, Stage::bound, Stage::running, "grow");
    if (request.stage == Stage::bound) start(r);
    request.base -= tokens;
    workers_[request.worker].load += tokens;
    made_ += tokens;
}

void Fleet::tick(std::int32_t w) {
    Worker& worker = workers_[w];
    ++worker.ticks;
    worker.load += worker.ticking;
    made_ += worker.ticking;
}

std::int64_t Fleet::leave(std::int32_t r) {
    Request& request = at(r, Stage::pooled, Stage::running, "leave");
    const std::int64_t made = age(request);
    if (request.stage == Stage::pooled)
        unlink(request);
    else
        detach(r);
    request.stage = Stage::gone;
    request.hits.clear();
    spare_.push_back(r);
    return made;
}

std::int32_t Fleet::add_worker(std::int64_t slots, std::int64_t room) {
    Worker worker;
    worker.slots = std::min(slots, kUnlimited);
    worker.room = std::min(room, kUnlimited);
    worker.alike = front_ends_;
    workers_.push_back(worker);
    look_for_room();
    return static_cast<std::int32_t>(workers_.size()) - 1;
}

void Fleet::set_state(std::int32_t w, WorkerState state) {
    Worker& worker = worker_at(w);
    if (worker.state == WorkerState::lost && state == WorkerState::draining)
        throw WorkerRefused("worker " + std::to_string(w) + " is lost: it has nothing to drain");
    worker.state = state;
    look_for_room();
}

void Fleet::set_capacity(std::int32_t w, std::int64_t slots, std::int64_t room) {
    Worker& worker = worker_at(w);
    worker.slots = std::min(slots, kUnlimited);
    worker.room = std::min(room, kUnlimited);
    look_for_room();
}

void Fleet::set_report(std::int32_t w, const Report& report) {
    Worker& worker = worker_at(w);
    worker.report = report;
    if (front_ends_ == 1) return;
    // What is not ours is another front end's; ours we know better than a report does.
    worker.alike = 1;
    worker.others_load = std::max<std::int64_t>(0, report.tokens - worker.load);
    worker.others_count =
        std::max<std::int64_t>(0, report.waiting + report.running - worker.count);
}

void Fleet::lose(std::int32_t w, std::vector<std::int32_t>& gone) {
    Worker& worker = worker_at(w);
    const std::vector<std::int32_t> members = worker.members;
    for (const std::int32_t r : members) {
        const Request& request = requests_[r];
        if (request.stage == Stage::running || request.made > 0 || request.pinned >= 0) {
            leave(r);
            gone.push_back(r);
            continue;
        }
        detach(r);
        requests_[r].stage = Stage::pooled;
        insert(r);
    }
    lose_pinned(w, gone);
    worker.state = WorkerState::lost;
    worker.report = {};
    worker.others_load = worker.others_count = 0;
    worker.alike = front_ends_;
    look_for_room();
}

void Fleet::lose_pinned(std::int32_t w, std::vector<std::int32_t>& gone) {
    for (std::int32_t r = pinned_.head; r >= 0;) {
        const std::int32_t next = requests_[r].next;
        if (requests_[r].pinned == w) {
            leave(r);
            gone.push_back(r);
        }
        r = next;
    }
}

void Fleet::bind(std::int32_t r, std::int32_t w) {
    Request& request = at(r, Stage::pooled, Stage::pooled, "bind");
    Worker& worker = workers_[w];
    unlink(request);
    request.stage = Stage::bound;
    request.worker = w;
    request.place = static_cast<std::int32_t>(worker.members.size());
    worker.members.push_back(r);
    worker.load += request.size;
    ++worker.count;
    expect(request, request.size - request.cached(w));
    bindings_.push_back({r, w});
}

Worker& Fleet::worker_at(std::int32_t w) {
    if (w < 0 || static_cast<std::size_t>(w) >= workers_.size())
        throw WorkerRefused("no worker " + std::to_string(w) + ": there are " +
                          std::to_string(workers_.size()));
    return workers_[w];
}

const Request& Fleet::request_at(std::int32_t r) const {
    if (r < 0 || static_cast<std::size_t>(r) >= requests_.size() ||
        requests_[r].stage == Stage::gone)
        throw RequestRefused("no request " + std::to_string(r));
    return requests_[r];
}

std::int64_t Fleet::present() const {
    return std::count_if(workers_.begin(), workers_.end(),
                         [](const Worker& worker) { return !worker.lost(); });
}

// Clamped as it is summed: a few dozen capacities without bound are more than 64 bits hold.
std::int64_t Fleet::free() const {
    std::int64_t sum = 0;
    for (const Worker& worker : workers_) sum = std::min(sum + worker.free(), kUnlimited);
    return sum;
}

std::int64_t Fleet::age(const Request& request) const {
    return request.stage == Stage::running ? workers_[request.worker].ticks - request.base
                                             : request.made;
}

void Fleet::require(std::int32_t r, Stage low, Stage high, const char* event) const {
    const Stage stage = request_at(r).stage;
    if (stage < low || stage > high)
        throw RequestRefused(std::string(event) + ": request " + std::to_string(r) + " is " +
                             name_of(stage));
}

Request& Fleet::at(std::int32_t r, Stage low, Stage high, const char* event) {
    require(r, low, high, event);
    return requests_[r];
}

void Fleet::insert(std::int32_t r) {
    Request& request = requests_[r];
    request.stranded = request.size > roomiest_;
    Line& line = line_of(request);
    std::int32_t before = line.tail;
    while (before >= 0 && requests_[before].order > request.order)
        before = requests_[before].previous;
    request.previous = before;
    request.next = before < 0 ? line.head : requests_[before].next;
    (before < 0 ? line.head : requests_[before].next) = r;
    (request.next < 0 ? line.tail : requests_[request.next].previous) = r;
    ++line.size;
}

void Fleet::look_for_room() {
    std::int64_t roomiest = strands_ ? -1 : kUnlimited;
    for (const Worker& worker : workers_)
        if (worker.serves()) roomiest = std::max(roomiest, worker.room);
    if (roomiest == roomiest_) return;
    roomiest_ = roomiest;
    std::vector<std::int32_t> moved;
    for (const std::int32_t head : {pool_.head, stranded_.head})
        for (std::int32_t r = head; r >= 0; r = requests_[r].next)
            if (requests_[r].stranded != (requests_[r].size > roomiest_)) moved.push_back(r);
    for (const std::int32_t r : moved) {
        unlink(requests_[r]);
        insert(r);
    }
}

void Fleet::unlink(Request& request) {
    Line& line = line_of(request);
    (request.previous < 0 ? line.head : requests_[request.previous].next) = request.next;
    (request.next < 0 ? line.tail : requests_[request.next].previous) = request.previous;
    request.previous = request.next = -1;
    --line.size;
}

void Fleet::expect(Request& request, std::int64_t missing) {
    workers_[request.worker].pending += missing - request.missing;
    request.missing = missing;
}

void Fleet::detach(std::int32_t r) {
    Request& request = requests_[r];
    Worker& worker = workers_[request.worker];
    worker.load -= weight(request);
    worker.running -= request.stage == Stage::running || request.made > 0;
    worker.ticking -= request.stage == Stage::running;
    --worker.count;
    expect(request, 0);
    const std::int32_t last = worker.members.back();
    worker.members[request.place] = last;
    requests_[last].place = request.place;
    worker.members.pop_back();
    request.worker = request.place = -1;
}

}  // namespace equipoise::requests
