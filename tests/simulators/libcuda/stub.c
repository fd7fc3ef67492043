// A libcuda.so.1 that only writes down its calls, one line each, to the file that LIBCUDA_CALLS
// names: for the real cuda-bindings, which look up every function of the driver by name.
//
// It answers what a driver with one device would: handles that are told apart by their values, and
// a device address that differs from the host's.

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_FOUND = 500 };

static _Thread_local void *context;
static _Thread_local int capture_mode;  // 0 is "global", as in a thread that never changed it

static int record(const char *format, ...) {
  FILE *file = fopen(getenv("LIBCUDA_CALLS"), "a");
  if (!file) return 999;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
  return SUCCESS;
}

static int thread_exchange_stream_capture_mode(int *mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return record("cuThreadExchangeStreamCaptureMode %d", capture_mode);
}

static int context_get_current(void **current) {
  *current = context;
  return record("cuCtxGetCurrent");
}

static int context_set_current(void *given) {
  context = given;
  return record("cuCtxSetCurrent %#lx", (unsigned long)(uintptr_t)given);
}

static int device_get(int *device, int ordinal) {
  *device = 40 + ordinal;
  return record("cuDeviceGet %d", ordinal);
}

static int device_primary_context_retain(void **retained, int device) {
  *retained = (void *)(uintptr_t)(0xc0 + device);
  return record("cuDevicePrimaryCtxRetain %d", device);
}

static int context_get_stream_priority_range(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return record("cuCtxGetStreamPriorityRange");
}

static int stream_create_with_priority(void **stream, unsigned flags, int priority) {
  *stream = (void *)0x5ea;
  return record("cuStreamCreateWithPriority %u %d", flags, priority);
}

static int host_get_device_pointer(uint64_t *address, void *host, unsigned flags) {
  *address = (uint64_t)(uintptr_t)host + (1ull << 40);
  return record("cuMemHostGetDevicePointer %u", flags);
}

static int stream_wait_value(void *stream, uint64_t address, uint32_t value, unsigned flags) {
  return record("cuStreamWaitValue32 %#lx %#lx %u %u", (unsigned long)(uintptr_t)stream,
                (unsigned long)address, value, flags);
}

static int stream_write_value(void *stream, uint64_t address, uint32_t value, unsigned flags) {
  return record("cuStreamWriteValue32 %#lx %#lx %u %u", (unsigned long)(uintptr_t)stream,
                (unsigned long)address, value, flags);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found);

static const struct {
  const char *name;
  void *function;
} FUNCTIONS[] = {
    {"cuGetProcAddress", cuGetProcAddress_v2},
    {"cuThreadExchangeStreamCaptureMode", thread_exchange_stream_capture_mode},
    {"cuCtxGetCurrent", context_get_current},
    {"cuCtxSetCurrent", context_set_current},
    {"cuDeviceGet", device_get},
    {"cuDevicePrimaryCtxRetain", device_primary_context_retain},
    {"cuCtxGetStreamPriorityRange", context_get_stream_priority_range},
    {"cuStreamCreateWithPriority", stream_create_with_priority},
    {"cuMemHostGetDevicePointer", host_get_device_pointer},
    {"cuStreamWaitValue32", stream_wait_value},
    {"cuStreamWriteValue32", stream_write_value},
};

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  for (size_t at = 0; at < sizeof FUNCTIONS / sizeof *FUNCTIONS; at++) {
    if (!strcmp(name, FUNCTIONS[at].name)) {
      *function = FUNCTIONS[at].function;
      return SUCCESS;
    }
  }
  *function = NULL;
  return NOT_FOUND;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
  int status = cuGetProcAddress(name, function, version, flags);
  if (found) *found = status;
  return status;
}
