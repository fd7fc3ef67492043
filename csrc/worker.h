// What one thread plans, layer by layer.
#pragma once

#include <vector>

#include "even.h"
#include "plan.h"
#include "rounding.h"

namespace equipoise {

// Writes one layer's row of the answer a call.
class Worker {
 public:
    Worker(const Request& request, const Answer& answer);

    // Whatever is installed.
    void plan_anew(std::int64_t layer);

    // What is installed stays, unless the layer misses the target by more than as much again: then
    // it is improved at once. Whether it stayed.
    bool keep(std::int64_t layer);

    // Within the layer's allowance.
    void improve(std::int64_t layer);

 private:
    Ids installed(std::int64_t layer) const;
    bool alike() const;
    void propose(std::int64_t layer);
    void reset(std::int64_t layer, Ids placement);
    void change(std::int64_t layer);
    void return_to_slots(Ids installed);
    bool far_off();
    bool level() const { return request_.aims.split == Split::kLevel; }
    void write(std::int64_t layer);
    std::int64_t moves(std::int64_t layer) const;

    const Request& request_;
    const Answer& answer_;
    Board board_;
    Leveller leveller_;
    Improver improver_;
    Evener evener_;
    Rounding rounding_;
    std::vector<std::int32_t> fresh_;
};

}  // namespace equipoise
