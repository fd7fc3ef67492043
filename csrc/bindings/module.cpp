#include "bindings/bindings.h"

NB_MODULE(_native, m) {
    m.doc() =
        "Native core of equipoise: planner, migration plan, routing, host copies, requests, "
        "simulator.";
    equipoise::bind_planning(m);
    equipoise::bind_migration(m);
    equipoise::bind_routing(m);
    equipoise::bind_host_copy(m);
    equipoise::bind_memory(m);
    equipoise::bind_requests(m);
    equipoise::bind_simulation(m);
}
