// Device memory that the host can reach only through the simulator.
#pragma once

#include <cstddef>
#include <cstdint>

namespace npusim {

constexpr uint8_t kFresh = 0xA7;  // what a new allocation holds
constexpr uint8_t kFreed = 0xDB;  // what a freed one holds

// A device address is inside a mapping without access rights, so a host that dereferences it dies.
// The same memory is mapped a second time, readable: `host` translates. Every function below is
// thread-safe and throws Failure.
void* device_malloc(int device, size_t bytes);
void device_free(void* pointer);
void* pinned_malloc(size_t bytes);
void pinned_free(void* pointer);

enum class Place { kDevice, kPinned, kPageable };
Place place_of(const void* pointer);
int device_of(const void* pointer);  // -1 when it is no device memory

// The readable address of `bytes` bytes that lie inside one live allocation of any device.
// `what` says for whom, and stands in the error.
uint8_t* host(const void* pointer, size_t bytes, const char* what);

// The same for memory anywhere. On the host, what lies in pinned blocks must lie in one live block;
// nothing is known of pageable memory.
uint8_t* reach(const void* pointer, size_t bytes, const char* what);

size_t total_memory();
size_t free_memory(int device);

}  // namespace npusim
