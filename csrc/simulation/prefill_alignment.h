// How engines hold prompts back, so that their data-parallel workers compute them in the same
// steps.
// docs/design/request-balance.md names the engines and what is left out of their rules.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace equipoise::requests {

// Of one worker, before a step.
struct PrefillState {
    bool computing = false;  // some prompts, from a step before
    bool admits = false;     // a request waits in its queue, and has a slot and KV cache
    bool full = false;       // as many requests decode as it has slots
    std::int64_t decoding = 0;
};

// What it may do in the step.
struct PrefillPermission {
    bool admit = true, compute = true;
};

class PrefillAlignment {
 public:
    virtual ~PrefillAlignment() = default;

    virtual void decide(const std::vector<PrefillState>& workers,
                        std::vector<PrefillPermission>& permissions) = 0;
    // A worker has admitted what it may; so many requests are in its queue still.
    virtual void admitted(std::size_t worker, std::int64_t queued) {
        static_cast<void>(worker);
        static_cast<void>(queued);
    }
};

// `rule`: "" (none), "sglang", "vllm" or "trtllm"; `limit`: its bound, in steps.
std::unique_ptr<PrefillAlignment> make_prefill_alignment(const std::string& rule,
                                                         std::int64_t limit, std::size_t workers);

}  // namespace equipoise::requests
