/*
 * A guest that lies: puts frames on a device, COUNT of each kind, with made-up senders.
 * Usage: frames DEVICE COUNT TARGET, TARGET the IPv4 address that the spoofed datagrams are for.
 *   - ARP requests for the gateway and ARP answers in its name, from ever other addresses
 *   - IPv4 datagrams from ever other addresses and MAC addresses
 *   - IPv6 neighbour solicitations to all nodes
 */
#include <arpa/inet.h>
#include <errno.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <netpacket/packet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int fd;
static struct sockaddr_ll device;

static void send_frame(const void *frame, size_t length) {
  while (sendto(fd, frame, length, 0, (struct sockaddr *)&device, sizeof device) < 0) {
    if (errno != ENOBUFS && errno != EAGAIN) {
      perror("frames");
      exit(1);
    }
    usleep(1000);
  }
}

static void ethernet(unsigned char *frame, uint32_t sender, uint16_t type) {
  memset(frame, 0xff, 6);
  memcpy(frame + 6, "\x02\xaa", 2);
  memcpy(frame + 8, &sender, 4);
  frame[12] = (unsigned char)(type >> 8);
  frame[13] = (unsigned char)type;
}

static void arp(uint32_t number, int operation, uint32_t sender, uint32_t target) {
  unsigned char frame[42] = {0};
  ethernet(frame, number, ETHERTYPE_ARP);
  memcpy(frame + 14, "\0\1\x08\0\6\4\0", 7);
  frame[21] = (unsigned char)operation;
  memcpy(frame + 22, frame + 6, 6);
  memcpy(frame + 28, &sender, 4);
  memcpy(frame + 38, &target, 4);
  send_frame(frame, sizeof frame);
}

static uint16_t checksum(const unsigned char *bytes, size_t length) {
  uint32_t sum = 0;
  for (size_t i = 0; i < length; i += 2) sum += (uint32_t)(bytes[i] << 8 | bytes[i + 1]);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return (uint16_t)~sum;
}

static void datagram(uint32_t number, uint32_t sender, uint32_t target) {
  unsigned char frame[14 + 20 + 8 + 4] = {0};
  ethernet(frame, number, ETHERTYPE_IP);
  unsigned char *ip = frame + 14;
  memcpy(ip, "\x45\0\0\x20\0\0\0\0\x40\x11", 10);
  memcpy(ip + 12, &sender, 4);
  memcpy(ip + 16, &target, 4);
  uint16_t sum = checksum(ip, 20);
  ip[10] = (unsigned char)(sum >> 8);
  ip[11] = (unsigned char)sum;
  memcpy(ip + 20, "\x12\x34\x1b\x58\0\x0c\0\0lie!", 12);
  send_frame(frame, sizeof frame);
}

static void solicitation(uint32_t number) {
  unsigned char frame[14 + 40 + 24] = {0};
  ethernet(frame, number, ETHERTYPE_IPV6);
  memcpy(frame, "\x33\x33\0\0\0\1", 6);
  memcpy(frame + 14, "\x60\0\0\0\0\x18\x3a\xff", 8);
  frame[22] = 0xfe;
  frame[23] = 0x80;
  memcpy(frame + 34, &number, 4);
  memcpy(frame + 38, "\xff\x02", 2);
  frame[53] = 1;
  frame[54] = 135;
  send_frame(frame, sizeof frame);
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  fd = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));
  device = (struct sockaddr_ll){.sll_family = AF_PACKET, .sll_ifindex = (int)if_nametoindex(argv[1])};
  if (fd < 0 || device.sll_ifindex == 0) return 1;
  uint32_t gateway = inet_addr("169.254.0.22"), guest = inet_addr("169.254.0.21"), target = inet_addr(argv[3]);
  for (uint32_t i = 0; i < (uint32_t)atoi(argv[2]); i++) {
    uint32_t other = htonl(0x0a630000 + i), neighbour = htonl(0x0a0b0000 + (i & 0xff));
    arp(i, 1, other, gateway);
    arp(i, 1, htonl(0xa9fe0100 + (i & 0xff)), gateway);
    arp(i, 2, gateway, gateway);
    arp(i, 2, guest, gateway);
    datagram(i, other, target);
    datagram(i, neighbour, target);
    solicitation(i);
  }
  return 0;
}
