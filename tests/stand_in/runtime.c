// A CUDA runtime that launches nothing. Streams, events, recordings and memory behave as CUDA's do:
// what CUDA refuses while a stream is recorded is refused, and a recording that ends while another
// stream still has work of it fails. No number is computed: memory holds zeros, and small copies.
//
// Every stream has a clock for each stream: how much of that stream's work it has waited for.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAX_STREAMS = 256, PAGE = 4096, NUM_FRAMES = 16 };
static const size_t MOVED_BYTES = 1 << 20;     // larger copies carry pixels and weights: not made
static const size_t CONTEXT_BYTES = 500 << 20; // what CUDA itself takes of a device

typedef struct {
  int id;
  long clock[MAX_STREAMS];
  unsigned long long recording; // 0: none
} Stream;
typedef struct {
  long clock[MAX_STREAMS];
  unsigned long long recording;
  int recorded;
} Event;
typedef struct {
  size_t nodes;
} Graph;
typedef struct {
  unsigned long long recording;
  long time;
  void *communicator;
} Collective;

// Read by name from Python.
size_t stand_in_launches, stand_in_nodes, stand_in_replays, stand_in_illegal, stand_in_unjoined;
size_t stand_in_collectives, stand_in_concurrent, stand_in_used_bytes, stand_in_peak_bytes;
size_t stand_in_total_bytes = (size_t)143771 << 20; // an H200's

static Stream first_stream, *streams[MAX_STREAMS] = {&first_stream};
static int num_streams = 1;
static unsigned long long num_recordings;
static size_t nodes; // of the recording under way
static Collective collectives[MAX_STREAMS];
static FILE *collectives_log;
static int num_devices = 1, major = 9, minor = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
static __thread int recordings_of_thread, device;
static __thread cudaError_t last_error;

__attribute__((constructor)) static void read_environment(void) {
  const char *memory = getenv("STAND_IN_MB"), *devices = getenv("STAND_IN_DEVICES");
  const char *capability = getenv("STAND_IN_CAPABILITY"), *path = getenv("STAND_IN_LOG");
  if (memory) stand_in_total_bytes = (size_t)atol(memory) << 20;
  if (devices) num_devices = atoi(devices);
  if (capability) sscanf(capability, "%d.%d", &major, &minor);
  if (path) {
    char name[4096];
    const char *rank = getenv("RANK");
    snprintf(name, sizeof name, "%s.%s", path, rank ? rank : "0");
    collectives_log = fopen(name, "w");
  }
}

static cudaError_t fail(cudaError_t error) { return last_error = error; }

static Stream *stream_of(cudaStream_t handle) {
  return (size_t)handle < 16 ? &first_stream : (Stream *)handle; // 1 and 2 name the default streams
}

static void say_where(const char *what) {
  void *frames[NUM_FRAMES];
  fprintf(stderr, "stand-in: %s\n", what);
  backtrace_symbols_fd(frames, backtrace(frames, NUM_FRAMES), 2);
}

// Whether this thread may call what waits for the device, or takes its memory, now.
static int refused(const char *call) {
  if (!recordings_of_thread || mode == cudaStreamCaptureModeRelaxed) return 0;
  stand_in_illegal++;
  say_where(call);
  fail(cudaErrorStreamCaptureUnsupported);
  return 1;
}

static void work_on(Stream *stream) {
  stream->clock[stream->id]++;
  if (stream->recording) {
    nodes++;
    stand_in_nodes++;
  } else {
    stand_in_launches++;
  }
}

int stand_in_work(void *handle) {
  pthread_mutex_lock(&lock);
  Stream *stream = stream_of(handle);
  if (stream == &first_stream && recordings_of_thread) {
    stand_in_illegal++;
    say_where("work on the default stream while another one is recorded");
  }
  work_on(stream);
  pthread_mutex_unlock(&lock);
  return 0;
}

// Two communicators' collectives must not run at once: ranks could start them in different orders.
int stand_in_collective(void *handle, void *communicator, int id, const char *name, size_t count,
                        int type) {
  pthread_mutex_lock(&lock);
  Stream *stream = stream_of(handle);
  int concurrent = 0;
  for (int i = 0; i < num_streams; i++) {
    Collective *other = &collectives[i];
    if (other->communicator && other->communicator != communicator &&
        other->recording == stream->recording && stream->clock[i] < other->time)
      concurrent = 1;
  }
  work_on(stream);
  collectives[stream->id] =
      (Collective){stream->recording, stream->clock[stream->id], communicator};
  stand_in_collectives++;
  stand_in_concurrent += concurrent;
  if (collectives_log) {
    const char *when = stream->recording ? "recorded" : "called";
    fprintf(collectives_log, "%d %s %zu %d %s\n", id, name, count, type, when);
    fflush(collectives_log);
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

// --- memory ------------------------------------------------------------------------------------

static void *map(size_t size) { // pages that nothing touches take no memory of the host
  size_t *pages = mmap(0, size + PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return 0;
  *pages = size;
  return (char *)pages + PAGE;
}

static size_t unmap(void *pointer) {
  size_t *pages = (size_t *)((char *)pointer - PAGE), size = *pages;
  munmap(pages, size + PAGE);
  return size;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
  *pointer = 0;
  if (refused("cudaMalloc")) return last_error;
  pthread_mutex_lock(&lock);
  int full = stand_in_used_bytes + size + CONTEXT_BYTES > stand_in_total_bytes;
  if (!full) stand_in_used_bytes += size;
  if (stand_in_used_bytes > stand_in_peak_bytes) stand_in_peak_bytes = stand_in_used_bytes;
  pthread_mutex_unlock(&lock);
  if (full) return fail(cudaErrorMemoryAllocation);
  *pointer = map(size);
  return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *pointer) {
  if (!pointer) return cudaSuccess;
  if (refused("cudaFree")) return last_error;
  pthread_mutex_lock(&lock);
  stand_in_used_bytes -= unmap(pointer);
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
  if (refused("cudaHostAlloc")) return last_error;
  *pointer = map(size);
  return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *pointer) {
  if (refused("cudaFreeHost")) return last_error;
  if (pointer) unmap(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  size_t taken = stand_in_used_bytes + CONTEXT_BYTES;
  *total = stand_in_total_bytes;
  *free = taken < *total ? *total - taken : 0;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t handle) {
  stand_in_work(handle);
  if (!stream_of(handle)->recording && size <= MOVED_BYTES) memcpy(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  if (refused("cudaMemcpy")) return last_error;
  return cudaMemcpyAsync(to, from, size, kind, 0);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t handle) {
  stand_in_work(handle);
  if (!stream_of(handle)->recording && size <= MOVED_BYTES) memset(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
  return cudaMemsetAsync(to, value, size, 0);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
  memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeDevice;
  found->device = device;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
  static char bytes[1 << 20];
  *pointer = bytes;
  return cudaSuccess;
}

// --- streams, events, recordings ----------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
  pthread_mutex_lock(&lock);
  if (num_streams == MAX_STREAMS) {
    fprintf(stderr, "stand-in: more than %d streams\n", MAX_STREAMS);
    abort();
  }
  Stream *stream = calloc(1, sizeof *stream);
  stream->id = num_streams;
  streams[num_streams++] = stream;
  pthread_mutex_unlock(&lock);
  *handle = (cudaStream_t)stream;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
  *status = stream_of(handle)->recording ? cudaStreamCaptureStatusActive
                                         : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  cudaStreamIsCapturing(handle, status);
  if (id) *id = stream_of(handle)->recording;
  if (graph) *graph = (cudaGraph_t)1;
  if (dependencies) *dependencies = 0;
  if (edges) *edges = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *other) {
  enum cudaStreamCaptureMode before = mode;
  mode = *other;
  *other = before;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode of_calls) {
  Stream *stream = stream_of(handle);
  if (stream == &first_stream || stream->recording) {
    stand_in_illegal++;
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  pthread_mutex_lock(&lock);
  stream->recording = ++num_recordings;
  memset(stream->clock, 0, sizeof stream->clock);
  nodes = 0;
  recordings_of_thread++;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  Stream *stream = stream_of(handle);
  unsigned long long recording = stream->recording;
  int unjoined = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_streams; i++) {
    if (streams[i]->recording != recording) continue;
    if (streams[i] != stream && streams[i]->clock[i] > stream->clock[i]) unjoined = 1;
    streams[i]->recording = 0;
  }
  recordings_of_thread--;
  pthread_mutex_unlock(&lock);
  *graph = 0;
  if (unjoined) {
    stand_in_unjoined++;
    say_where("a recording ends, and a stream of it was not joined");
    return fail(cudaErrorStreamCaptureUnjoined);
  }
  Graph *made = malloc(sizeof *made);
  made->nodes = nodes;
  *graph = (cudaGraph_t)made;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *found, size_t *count) {
  *count = ((Graph *)graph)->nodes;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph,
                                          unsigned long long flags) {
  *made = malloc(sizeof(Graph));
  memcpy(*made, graph, sizeof(Graph));
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  free(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  free(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  stand_in_replays++;
  return stand_in_work(handle);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(Event));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t of) {
  Stream *stream = stream_of(of);
  Event *event = (Event *)handle;
  pthread_mutex_lock(&lock);
  memcpy(event->clock, stream->clock, sizeof event->clock);
  event->recording = stream->recording;
  event->recorded = 1;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  return cudaEventRecord(event, handle);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
  Stream *stream = stream_of(handle);
  Event *event = (Event *)event_handle;
  if (!event->recorded) return cudaSuccess;
  if (stream->recording && event->recording != stream->recording) {
    stand_in_illegal++;
    say_where("a recorded stream waits for work outside of the recording");
    return fail(cudaErrorStreamCaptureIsolation);
  }
  pthread_mutex_lock(&lock);
  if (!stream->recording && event->recording) { // it becomes a part of the recording
    stream->recording = event->recording;
    memset(stream->clock, 0, sizeof stream->clock);
  }
  for (int i = 0; i < MAX_STREAMS; i++)
    if (event->clock[i] > stream->clock[i]) stream->clock[i] = event->clock[i];
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (refused("cudaEventQuery")) return last_error;
  return ((Event *)handle)->recording ? fail(cudaErrorCapturedEvent) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return refused("cudaEventSynchronize") ? last_error : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = 1;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (refused("cudaStreamSynchronize")) return last_error;
  return stream_of(handle)->recording ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return stream_of(handle)->recording ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  return refused("cudaDeviceSynchronize") ? last_error : cudaSuccess;
}

// --- launches -----------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t handle) {
  return stand_in_work(handle);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared, cudaStream_t handle) {
  return stand_in_work(handle);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                void **arguments) {
  return stand_in_work(config->stream);
}

static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared = shared;
  pushed.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *stream = pushed.stream;
  return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[64];
  return handle;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->binaryVersion = found->ptxVersion = 10 * major + minor;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = 0;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// --- the device ---------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int *count) {
  *count = num_devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *found) {
  *found = device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int chosen) {
  device = chosen;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int of) {
  switch (attribute) {
  case cudaDevAttrComputeCapabilityMajor: *value = major; break;
  case cudaDevAttrComputeCapabilityMinor: *value = minor; break;
  case cudaDevAttrMultiProcessorCount: *value = 132; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
  case cudaDevAttrL2CacheSize: *value = 60 << 20; break;
  case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ: *value = 65535; break;
  case cudaDevAttrWarpSize: *value = 32; break;
  default: *value = 1024;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int of) {
  memset(found, 0, sizeof *found);
  const char *name = getenv("STAND_IN_NAME");
  snprintf(found->name, sizeof found->name, "%s", name ? name : "stand-in for NVIDIA H200");
  found->totalGlobalMem = stand_in_total_bytes;
  found->major = major;
  found->minor = minor;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerBlock = 65536;
  found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 60 << 20;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->textureAlignment = 512;
  return cudaSuccess;
}

// --- errors -------------------------------------------------------------------------------------

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
  case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
  case cudaErrorStreamCaptureIsolation: return "dependency on uncaptured work in another stream";
  default: return "an error of the stand-in";
  }
}

const char *cudaGetErrorName(cudaError_t error) { return "cudaError"; }
